from __future__ import annotations

import numpy as np
import pytest
from helpers.calibration import miscalibrated_blocks

from trtllm_dspark import _core
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation import Calibration, ConfidenceRecorder
from trtllm_dspark.speculation.calibration import (
    NUM_BINS,
    Observations,
    area_under_curve,
    evaluate,
    expected_calibration_error,
    noise_floor,
)
from trtllm_dspark.speculation.fit import MIN_BLOCKS, fit_calibration

IDENTITY = Calibration.identity(5)


def test_ece_by_hand() -> None:
    predicted = np.array([0.1, 0.12, 0.9, 1.0])
    outcome = np.array([False, True, True, True])
    # Bins of one twentieth: {0.1, 0.12}, {0.9}, {1.0}.
    assert expected_calibration_error(predicted, outcome) == pytest.approx((abs(0.22 - 1) + 0.1 + 0.0) / 4)


def test_ece_of_the_true_probabilities_is_noise_only() -> None:
    rng = np.random.default_rng(0)
    predicted = rng.uniform(size=50_000)
    outcome = rng.uniform(size=50_000) < predicted
    assert expected_calibration_error(predicted, outcome) < 3 * np.sqrt(NUM_BINS / 50_000)


@pytest.mark.parametrize(
    ("predicted", "outcome", "auc"),
    [
        ([0.1, 0.2, 0.8, 0.9], [False, False, True, True], 1.0),
        ([0.9, 0.1], [False, True], 0.0),
        ([0.5, 0.5, 0.5], [False, True, True], 0.5),
        ([0.1, 0.5, 0.5, 0.9], [False, False, True, True], 0.875),
    ],
)
def test_auc_by_hand(predicted: list[float], outcome: list[bool], auc: float) -> None:
    assert area_under_curve(np.array(predicted), np.array(outcome)) == auc


def test_auc_of_one_class_is_not_a_number() -> None:
    assert np.isnan(area_under_curve(np.array([0.2, 0.3]), np.array([True, True])))


def test_calibrated_survival_equals_that_of_the_core() -> None:
    rng = np.random.default_rng(1)
    heads = _core.DraftHeads(
        vocab_size=4,
        draft_vocab_size=4,
        kind="none",
        confidence_weight=np.array([1.0], np.float32),
        confidence_with_markov=False,
    )
    logits = rng.normal(size=(6, 5, 1)).astype(np.float32)
    calibration = Calibration((0.5, 1.5, 2.0, 1.0, 0.7), (0.3, -1.0, 0.0, 2.0, -0.2))
    temperature, bias = calibration.arrays(5)
    tokens = np.zeros((6, 5), np.int64)
    got = _core.confidence(heads, logits, np.zeros(6, np.int64), tokens, temperature=temperature, bias=bias)
    expected = calibration.survival(logits[:, :, 0].astype(np.float64))
    np.testing.assert_allclose(np.cumprod(got, axis=1), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "bias"), [((1.0,), (0.0, 0.0)), ((0.0,), (0.0,)), ((-1.0,), (0.0,)), ((1.0,), (float("nan"),))]
)
def test_calibration_bad_numbers_are_refused(temperature: tuple[float, ...], bias: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="fit it again"):
        Calibration(temperature, bias)


@pytest.mark.parametrize(("scale", "shift"), [(3.0, 0.0), (1.0, 1.5), (0.5, -1.0), (3.0, 1.0)])
def test_fit_of_a_scaled_and_shifted_head_calibrates_other_blocks(scale: float, shift: float) -> None:
    fitted = fit_calibration(miscalibrated_blocks(4000, scale=scale, shift=shift, seed=0))
    other = miscalibrated_blocks(4000, scale=scale, shift=shift, seed=1)
    before, after = evaluate(IDENTITY, other), evaluate(fitted, other)
    assert before.mean_ece > 0.03
    assert after.mean_ece < 0.02
    assert after.mean_ece < before.mean_ece / 2


def test_fit_keeps_the_power_to_tell_blocks_apart() -> None:
    blocks = miscalibrated_blocks(4000, scale=3.0, shift=1.0, seed=0)
    before, after = evaluate(IDENTITY, blocks), evaluate(fit_calibration(blocks), blocks)
    assert all(a > b - 0.01 for a, b in zip(after.auc, before.auc, strict=True))
    # A constant would be calibrated as well, with an AUC of one half at the first position.
    assert after.auc[0] > 0.7


def test_fit_without_bias_is_temperature_scaling() -> None:
    fitted = fit_calibration(miscalibrated_blocks(4000, scale=3.0, shift=0.0, seed=0), with_bias=False)
    assert fitted.bias == (0.0,) * 5
    assert fitted.temperature[0] == pytest.approx(3.0, rel=0.25)


def test_fit_bias_removes_what_a_temperature_cannot() -> None:
    blocks, other = (miscalibrated_blocks(4000, scale=1.0, shift=1.5, seed=seed) for seed in (0, 1))
    both = evaluate(fit_calibration(blocks), other)
    alone = evaluate(fit_calibration(blocks, with_bias=False), other)
    assert both.ece[0] < alone.ece[0] / 2


def test_fit_is_sequential() -> None:
    blocks = miscalibrated_blocks(2000, scale=2.0, shift=0.5, seed=0)
    first = Observations(blocks.logits[:, :2], np.minimum(blocks.accepted, 2))
    whole = fit_calibration(blocks)
    found = fit_calibration(first)
    assert found.temperature == pytest.approx(whole.temperature[:2], rel=1e-4)
    assert found.bias == pytest.approx(whole.bias[:2], abs=1e-4)
    alone = [fit_calibration(part, with_bias=False).temperature for part in (first, blocks)]
    assert alone[0] == alone[1][:2]


def test_fit_too_few_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"{MIN_BLOCKS - 1} whole blocks are too few"):
        fit_calibration(miscalibrated_blocks(MIN_BLOCKS - 1, scale=1.0, shift=0.0, seed=0))


def test_fit_of_positions_without_an_acceptance_stays_finite() -> None:
    fitted = fit_calibration(Observations(np.zeros((600, 2)), np.zeros(600, np.int64)))
    assert np.isfinite([*fitted.temperature, *fitted.bias]).all()
    assert fitted.survival(np.zeros((1, 2)))[0, 0] < 0.05


def test_recorder_leaves_cut_blocks_out_and_returns_logits() -> None:
    recorder = ConfidenceRecorder(2)
    assert len(recorder.observations()) == 0
    confidence = np.array([[0.5, 0.8], [0.1, 0.1], [0.0, 1.0]], np.float32)
    recorder.record(confidence, np.array([2, 1, 2]), np.array([1, 1, 0]))
    found = recorder.observations()
    assert found.accepted.tolist() == [1, 0]
    assert found.logits[0] == pytest.approx([0.0, np.log(4.0)])
    assert np.isfinite(found.logits).all()


def test_noise_floor_is_what_true_probabilities_show() -> None:
    calibration = Calibration((3.0,) * 5, (0.0,) * 5)
    shown = [evaluate(calibration, miscalibrated_blocks(600, scale=3.0, shift=0.0, seed=s)).mean_ece for s in range(12)]
    blocks = miscalibrated_blocks(600, scale=3.0, shift=0.0, seed=99)
    floor = noise_floor(calibration, blocks)
    assert floor == pytest.approx(np.mean(shown), rel=0.1)
    assert floor == noise_floor(calibration, blocks)
    # Four times the blocks, half the scatter.
    more = noise_floor(calibration, miscalibrated_blocks(2400, scale=3.0, shift=0.0, seed=99), draws=30)
    assert more == pytest.approx(floor / 2, rel=0.1)
