"""Online calibration on streams whose truth is known: recovery, the guard, drift, and honest labels."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from helpers.confidence_streams import GAMMA, Head, blocks_of, serve, true_error, whole_blocks

from trtllm_dspark.speculation.calibration import Calibration, sigmoid
from trtllm_dspark.speculation.online_calibration import OnlineCalibration, OnlineConfig
from trtllm_dspark.speculation.online_error import label_error, log_likelihood
from trtllm_dspark.speculation.online_fit import fit_window
from trtllm_dspark.speculation.online_window import HELD_OUT_EVERY, Blocks, BlockWindow

IDENTITY = Calibration.identity(GAMMA)
RIGHT, TRIPLED = Head(), Head(scale=3.0)
HAIR = 0.012
"""What a fit of two numbers to a window cannot do better: its own scatter, in mean ECE."""


@pytest.mark.parametrize("threshold", [None, 0.3])
@pytest.mark.parametrize(("batch", "reached"), [(1, 0.07), (8, 0.05)])
@pytest.mark.parametrize("seed", range(3))
def test_head_with_tripled_logits_is_right_again_within_500_rounds(
    batch: int, reached: float, threshold: float | None, seed: int
) -> None:
    online = OnlineCalibration(IDENTITY)
    serve(online, lambda _: TRIPLED, rounds=500, batch=batch, seed=seed, threshold=threshold)
    before, after = true_error(IDENTITY, TRIPLED), true_error(online.calibration, TRIPLED)
    assert before > 0.15
    assert after < reached
    assert online.status.updates > 0


def test_recovery_begins_at_the_first_update() -> None:
    online = OnlineCalibration(IDENTITY)
    serve(online, lambda _: TRIPLED, rounds=online.config.every, batch=8, seed=0)
    assert online.status.updates == 1
    assert true_error(online.calibration, TRIPLED) < 0.06


@pytest.mark.parametrize("threshold", [None, 0.3])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("head", [RIGHT, TRIPLED, Head(0.5, 0.5), Head(1.0, -0.7)])
def test_held_out_error_never_gets_worse(head: Head, batch: int, threshold: float | None) -> None:
    for seed in range(2):
        errors = _errors_of_updates(head, batch, seed, threshold)
        for earlier, later in zip(errors, errors[1:], strict=False):
            assert later < max(earlier, 0.02) + HAIR, errors
        assert errors[-1] < errors[0] + HAIR


@pytest.mark.parametrize("seed", range(2))
def test_change_in_the_stream_is_followed_and_told_once(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    changed = Head(scale=3.0, mean=0.3)
    online = OnlineCalibration(IDENTITY)
    alarms = []
    with caplog.at_level(logging.INFO):
        serve(
            online,
            lambda index: RIGHT if index < 600 or index >= 1200 else changed,
            rounds=1800,
            batch=8,
            seed=seed,
            after=lambda _: alarms.append(online.status.drift),
        )
    assert not any(alarms[:600])
    assert all(alarms[800:1200])
    assert not any(alarms[1400:])
    said = [record for record in caplog.records if "drifted from the stored calibration" in record.getMessage()]
    assert len(said) == 1
    assert len([record for record in caplog.records if "fit the stored calibration again" in record.getMessage()]) == 1
    assert true_error(online.calibration, RIGHT) < 0.03


def test_slow_drift_is_followed() -> None:
    def head(index: int) -> Head:
        return Head(shift=1.5 * index / 1500)

    online = OnlineCalibration(IDENTITY)
    serve(online, head, rounds=1500, batch=8, seed=0)
    # The parameters lag behind by the part of the window they rest on.
    assert true_error(online.calibration, head(1499)) < true_error(IDENTITY, head(1499)) / 2


def test_update_that_blocks_speak_against_is_rolled_back() -> None:
    online = OnlineCalibration(IDENTITY)
    serve(online, lambda _: TRIPLED, rounds=64, batch=8, seed=0)
    assert online.calibration != IDENTITY
    # What the update replaced was right for what comes now.
    serve(online, lambda _: RIGHT, rounds=64, batch=8, seed=1)
    assert online.calibration == IDENTITY
    assert online.status.rollbacks == 1


def test_parameters_rest_on_past_rounds_only() -> None:
    online = OnlineCalibration(IDENTITY)
    serve(online, lambda _: TRIPLED, rounds=online.config.every - 1, batch=8, seed=0)
    temperature, bias = online.arrays(3)
    assert (temperature.tolist(), bias.tolist()) == ([1.0] * 3, [0.0] * 3)
    assert temperature.dtype == bias.dtype == np.float32


def test_window_labels_stop_at_the_cut() -> None:
    window = BlockWindow(3, 8)
    confidence = np.full((3, 3), 0.5, np.float32)
    window.add(confidence, np.array([2, 0, 3]), np.array([0, 0, 3]))
    blocks = window.blocks()
    # A block of which nothing was verified says nothing; one that was cut says nothing of the drafts behind the cut.
    assert blocks.labelled().tolist() == [[True, True, False], [True, True, True]]
    assert blocks.survived().tolist() == [[False, False, False], [True, True, True]]


def test_window_keeps_the_newest_and_splits_by_arrival() -> None:
    window = BlockWindow(2, 8)
    for accepted in range(20):
        window.add(np.full((1, 2), 0.5, np.float32), np.array([2]), np.array([accepted % 3]))
    blocks = window.blocks()
    assert sorted(blocks.serial.tolist()) == list(range(12, 20))
    assert sorted(blocks.newest(3).serial.tolist()) == [17, 18, 19]
    assert sorted(blocks.held_out().serial.tolist()) == [12, 16]
    assert len(blocks.fitted_on()) == len(blocks) - len(blocks) // HELD_OUT_EVERY


def test_window_of_one_great_round_keeps_its_last_blocks() -> None:
    window = BlockWindow(2, 4)
    window.add(np.full((9, 2), 0.5, np.float32), np.full(9, 2), np.arange(9) % 3)
    assert sorted(window.blocks().serial.tolist()) == [5, 6, 7, 8]


def test_labels_of_cut_blocks_do_not_bias_the_fit() -> None:
    """Blocks cut at a survival must give the parameters that whole blocks give."""
    rng = np.random.default_rng(0)
    blocks = blocks_of(TRIPLED, 20_000, rng)
    survival = np.cumprod(sigmoid(blocks.logits / 3), axis=1)
    verified = (survival >= 0.3).sum(axis=1)
    cut = Blocks(blocks.logits, verified, np.minimum(blocks.accepted, verified), np.arange(len(blocks)))
    fitted = fit_window(cut.where(verified > 0), start=IDENTITY, stored=IDENTITY)
    assert fitted.temperature == pytest.approx([3.0] * GAMMA, rel=0.15)
    assert fitted.bias == pytest.approx([0.0] * GAMMA, abs=0.15)


def test_position_that_is_never_verified_keeps_the_stored_parameters() -> None:
    stored = Calibration((1.0, 1.0, 1.0, 1.7, 1.8), (0.0, 0.0, 0.0, 0.3, 0.4))
    blocks = blocks_of(TRIPLED, 2000, np.random.default_rng(0))
    verified = np.full(2000, 3)
    cut = Blocks(blocks.logits, verified, np.minimum(blocks.accepted, verified), np.arange(2000))
    fitted = fit_window(cut, start=stored, stored=stored)
    assert fitted.temperature[3:] == pytest.approx((1.7, 1.8))
    assert fitted.bias[3:] == (0.3, 0.4)
    assert fitted.temperature[0] > 2


def test_position_with_few_labels_keeps_what_older_blocks_have_told() -> None:
    start = Calibration((1.0, 1.0, 1.0, 1.7, 1.8), (0.0, 0.0, 0.0, 0.3, 0.4))
    blocks = blocks_of(TRIPLED, 2000, np.random.default_rng(0))
    verified = np.where(np.arange(2000) < 20, GAMMA, 3)
    cut = Blocks(blocks.logits, verified, np.minimum(blocks.accepted, verified), np.arange(2000))
    fitted = fit_window(cut, start=start, stored=IDENTITY)
    assert fitted.temperature[3:] == pytest.approx((1.7, 1.8))
    assert fitted.bias[3:] == pytest.approx((0.3, 0.4))
    assert fitted.temperature[0] > 2


def test_error_without_noise_is_near_zero_where_the_plain_one_is_not() -> None:
    found = [label_error(IDENTITY, whole_blocks(RIGHT, 512, seed)) for seed in range(20)]
    plain, debiased = np.array(found).mean(axis=0)
    assert plain > 0.04
    assert debiased < 0.02
    assert label_error(IDENTITY, whole_blocks(TRIPLED, 512, 0))[1] > 0.15


def test_error_of_too_few_labels_is_unknown() -> None:
    assert np.isnan(label_error(IDENTITY, whole_blocks(RIGHT, 20, 0))).all()


def test_log_likelihood_by_hand() -> None:
    blocks = Blocks(np.zeros((3, 2)), np.array([2, 1, 2]), np.array([1, 1, 2]), np.arange(3))
    # Accepted and rejected; accepted and cut; both accepted.
    assert log_likelihood(Calibration((1.0, 1.0), (0.0, np.log(3.0))), blocks) == pytest.approx(
        [np.log(0.5) + np.log(0.25), np.log(0.5), np.log(0.5) + np.log(0.75)]
    )


def test_streams_without_a_label_change_nothing() -> None:
    online = OnlineCalibration(IDENTITY, OnlineConfig(every=4))
    for _ in range(12):
        online.observe(np.full((2, GAMMA), 0.5, np.float32), np.zeros(2, np.int64), np.zeros(2, np.int64))
    assert online.calibration == IDENTITY
    assert online.status.blocks == 0


@pytest.mark.parametrize("outcome", [0, GAMMA])
def test_stream_of_one_outcome_stays_finite(outcome: int) -> None:
    online = OnlineCalibration(IDENTITY)
    rng = np.random.default_rng(0)
    for _ in range(300):
        confidence = rng.uniform(size=(8, GAMMA)).round(1).astype(np.float32)
        online.observe(confidence, np.full(8, GAMMA), np.full(8, outcome))
    temperature, bias = online.arrays(GAMMA)
    assert np.isfinite(temperature).all()
    assert np.isfinite(bias).all()
    assert (temperature > 0).all()


def _errors_of_updates(head: Head, batch: int, seed: int, threshold: float | None) -> list[float]:
    """Return the true errors of the calibrations that were in force, one after the other."""
    online = OnlineCalibration(IDENTITY)
    in_force = [IDENTITY]

    def note(_: int) -> None:
        if online.calibration != in_force[-1]:
            in_force.append(online.calibration)

    serve(online, lambda _: head, rounds=700, batch=batch, seed=seed, threshold=threshold, after=note)
    return [true_error(calibration, head) for calibration in in_force]
