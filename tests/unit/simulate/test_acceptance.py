"""Drawn blocks have the acceptance they were asked for, and confidences that mean what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trtllm_dspark.errors import ConfigError, UsageError
from trtllm_dspark.simulate.acceptance import (
    AcceptanceProfile,
    accepted_len,
    from_recorded,
    level_of,
    read_acceptance,
    write_acceptance,
)
from trtllm_dspark.simulate.blocks import Blocks, ConfidenceModel, draw_blocks
from trtllm_dspark.simulate.pool import BlockPool, calibrated
from trtllm_dspark.simulate.published import PUBLISHED, published
from trtllm_dspark.speculation import Calibration
from trtllm_dspark.speculation.calibration import area_under_curve, expected_calibration_error

COUNT = 40_000


def draw(conditional: tuple[float, ...], **model: float) -> Blocks:
    return draw_blocks(conditional, ConfidenceModel(**model), COUNT, np.random.default_rng(3))


@pytest.mark.parametrize("conditional", [(0.93, 0.9, 0.88, 0.85, 0.8), (0.6,) * 5, (0.53, 0.6, 0.66, 0.7, 0.74)])
@pytest.mark.parametrize("spread", [0.0, 1.5, 3.0])
def test_conditional_acceptance_by_position_is_the_one_asked_for(conditional: tuple[float, ...], spread: float) -> None:
    blocks = draw(conditional, spread=spread, persistence=0.3)
    assert blocks.conditional() == pytest.approx(conditional, abs=0.02)
    assert blocks.accepted_len == pytest.approx(accepted_len(conditional), rel=0.02)


def test_confidence_is_calibrated_and_tells_as_much_as_the_paper_measures() -> None:
    """Section 3.2.1: about 1 % calibration error after scaling, area under the curve 0.81 to 0.91."""
    blocks = draw((0.75,) * 7)
    survival = np.cumprod(blocks.confidence.astype(np.float64), axis=1)
    for position in range(7):
        survived = blocks.accepted > position
        assert expected_calibration_error(survival[:, position], survived) < 0.02
        assert 0.8 < area_under_curve(survival[:, position], survived) < 0.93


def test_a_temperature_makes_the_head_too_sure_and_its_calibration_repairs_that() -> None:
    blocks = draw((0.75,) * 5, temperature=2.0, bias=0.4)
    pool = BlockPool({"all": blocks})
    repaired = calibrated(pool.logits, *Calibration((2.0,) * 5, (0.4,) * 5).arrays(5))
    survived = blocks.accepted > 2

    def error(confidence: np.ndarray) -> float:
        return expected_calibration_error(np.cumprod(confidence.astype(np.float64), axis=1)[:, 2], survived)

    assert error(blocks.confidence) > 0.05
    assert error(repaired) < 0.015


def test_noise_costs_what_confidence_tells() -> None:
    def auc(noise: float) -> float:
        blocks = draw((0.7,) * 3, noise=noise)
        return area_under_curve(blocks.confidence[:, 0].astype(np.float64), blocks.accepted > 0)

    assert auc(0.0) > auc(2.0) + 0.05


def test_neighbouring_blocks_of_a_request_are_alike_by_the_persistence() -> None:
    lasting, none = draw((0.7,) * 3, persistence=0.9), draw((0.7,) * 3, persistence=0.0)

    def correlation(blocks: Blocks) -> float:
        return float(np.corrcoef(blocks.accepted[:-1], blocks.accepted[1:])[0, 1])

    assert correlation(lasting) > 0.1 > abs(correlation(none)) * 3


def test_pool_leads_a_request_round_its_own_domain() -> None:
    pool = BlockPool({"a": draw((0.9,) * 2), "b": draw((0.1,) * 2)})
    index = pool.place("b", np.random.default_rng(0))
    for _ in range(COUNT + 5):
        index = int(pool.following[index])
        assert COUNT <= index < 2 * COUNT


def by_token(*accepted: int, starts: tuple[int, ...] = (0,)) -> Blocks:
    return Blocks(np.full((len(accepted), 3), 0.5, np.float32), np.array(accepted, np.int64), starts)


def test_blocks_of_every_token_are_met_as_far_apart_as_a_round_emits_tokens() -> None:
    blocks = by_token(2, 1, 0, 3, 2, 1, 0, 0, starts=(0, 6))
    # The first text: 2 accepted, on to the fourth block, 3 accepted, over its end; the second: none, none.
    assert blocks.met.tolist() == [2, 3, 0, 0]
    assert blocks.accepted_len == 1 + 5 / 4
    assert blocks.conditional() == pytest.approx([2 / 4, 1.0, 1 / 2])


def test_pool_goes_on_by_the_tokens_of_a_round_and_begins_with_a_text() -> None:
    pool = BlockPool({"a": by_token(0, 3, 1), "b": by_token(1, 1, 0, 2, 1, starts=(0, 3))})
    assert pool.by_token
    generator = np.random.default_rng(0)
    # Every domain is followed by its first blocks once more: those of "b" begin at 3 + 4.
    assert {pool.place("b", generator) for _ in range(50)} == {7, 10}
    assert {pool.place("a", generator) for _ in range(9)} == {0}
    rows = pool.rows()
    for block in (0, 1, 2, 7, 11):
        rows.join(block, 100)
    numbers = np.arange(len(pool.accepted), dtype=np.float32)[:, None]
    for verified, accepted, on in ((3, [0, 3, 1, 1, 1], [1, 2, 1, 9, 8]), (1, [1, 1, 1, 0, 1], [0, 1, 0, 10, 10])):
        assert rows.advance(np.full(5, verified))[0].tolist() == accepted
        assert rows.confidence(numbers)[:, 0].tolist() == on
    with pytest.raises(ConfigError, match="blocks of every token in some domains only"):
        BlockPool({"a": by_token(0, 3, 1), "b": draw((0.1,) * 3)})


@pytest.mark.parametrize("starts", [[], [1, 2], [0, 0], [0, 3], [0, "x"]])
def test_starts_survive_the_file_and_bad_ones_are_refused(tmp_path: Path, starts: list[object]) -> None:
    path = tmp_path / "a.json"
    write_acceptance(path, from_recorded("n", "s", {"math": by_token(2, 0, 1, starts=(0, 2))}))
    assert read_acceptance(path).blocks("math", seed=0).starts == (0, 2)
    assert read_acceptance(path).cut(1).blocks("math", seed=0).met.tolist() == [1, 1]
    raw = json.loads(path.read_text())
    assert raw["schema_version"] == 2
    raw["domains"]["math"]["starts"] = starts
    path.write_text(json.dumps(raw))
    with pytest.raises(UsageError, match="malformed"):
        read_acceptance(path)
    del raw["domains"]["math"]["starts"]
    path.write_text(json.dumps(raw | {"schema_version": 1}))
    assert read_acceptance(path).blocks("math", seed=0).starts is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_profiles_give_the_published_accepted_length(name: str) -> None:
    expected = {
        "qwen3-4b": {"gsm8k": 6.11, "alpaca": 3.54},
        "qwen3-8b": {"gsm8k": 6.17, "arena_hard": 3.21},
        "qwen3-14b": {"math": 5.74, "livecodebench": 5.02},
        "gemma4-12b": {"humaneval": 5.64, "mt_bench": 3.49},
        "glm-5.2": {"mean": 1 + 0.829 + 0.723 + 0.646 + 0.587 + 0.539 + 0.500 + 0.464},
        "qwen3.8": {"gsm8k": 4.90},
    }
    profile = published(name)
    for domain, length in expected[name].items():
        assert profile.accepted_len(domain) == pytest.approx(length, abs=0.01)
    assert "assumed" in profile.source


def test_level_of_inverts_accepted_len() -> None:
    assert accepted_len([level_of(4.2, 7)] * 7) == pytest.approx(4.2)
    with pytest.raises(ConfigError, match="impossible with 5 drafts"):
        level_of(6.5, 5)


def test_profile_survives_its_file_and_keeps_recorded_blocks(tmp_path: Path) -> None:
    blocks = draw((0.8, 0.7))
    small = Blocks(blocks.confidence[:300], blocks.accepted[:300])
    written = from_recorded("mine", "measured", {"math": small}, Calibration((1.1, 1.2), (0.0, 0.1)))
    write_acceptance(tmp_path / "a.json", written)
    read = read_acceptance(tmp_path / "a.json")
    assert read.calibration == written.calibration
    assert read.blocks("math", seed=0).accepted.tolist() == small.accepted.tolist()
    assert read.blocks("math", seed=0).confidence == pytest.approx(small.confidence, abs=1e-5)
    assert read.accepted_len("math") == pytest.approx(small.accepted_len, abs=1e-5)


def test_cut_keeps_the_first_positions_only(profile: AcceptanceProfile) -> None:
    assert profile.cut(2).conditional["math"] == (0.9, 0.9)
    with pytest.raises(ConfigError, match="knows 5 positions, 9 are asked for"):
        profile.cut(9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "x"}, "is no acceptance profile"),
        ({"schema_version": 9}, "schema_version 9, this version reads 1 and 2"),
        ({"domains": {}}, "has no domains"),
        ({"domains": {"a": {"conditional": [2.0]}}}, "acceptance lies in"),
        ({"domains": {"a": {"conditional": [0.5]}, "b": {"conditional": [0.5, 0.4]}}}, "same positions"),
        ({"domains": {"a": {}}}, "is malformed"),
        ({"confidence": {"spread": -1}}, "must not be negative"),
        ({"confidence": {"sprad": 1}}, "is malformed"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_bad_profile_is_one_sentence(
    tmp_path: Path, profile: AcceptanceProfile, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "a.json"
    write_acceptance(path, profile)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=message):
        read_acceptance(path)
