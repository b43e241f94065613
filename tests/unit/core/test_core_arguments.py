"""What the core refuses, and with which error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.core_cases import HeadCase, head_case

from trtllm_dspark import _core
from trtllm_dspark.errors import NativeError, ShapeError


@pytest.fixture
def case() -> HeadCase:
    return head_case(np.random.default_rng(0), "vanilla", vocab=50, draft_vocab=20, rank=4, hidden=6)


def good_chain(case: HeadCase) -> dict[str, Any]:
    return {
        "heads": case.native(),
        "base_logits": np.zeros((2, 3, 20), np.float32),
        "anchors": np.zeros(2, np.int64),
        "positions": np.zeros(2, np.int64),
        "sampling": _core.Sampling(np.ones(2, np.float32), np.arange(2, dtype=np.uint64)),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("base_logits", np.zeros((2, 3, 20)), r"base_logits: expected \[R, gamma, Vd=20\] float32, got .* float64"),
        ("base_logits", np.zeros((2, 3, 21), np.float32), r"got \[2, 3, 21\] float32"),
        ("base_logits", np.zeros((2, 20), np.float32), r"got \[2, 20\] float32"),
        ("base_logits", np.zeros((2, 0, 20), np.float32), "gamma in 1..64"),
        ("base_logits", np.zeros((2, 65, 20), np.float32), "gamma in 1..64"),
        ("base_logits", np.zeros((2, 6, 20), np.float32)[:, ::2], "with gaps"),
        ("base_logits", [[1.0]], "got .*list"),
        ("base_logits", None, "got .*NoneType"),
        ("anchors", np.zeros(2, np.int32), r"anchors: expected \[R=2\] int64, got \[2\] int32"),
        ("anchors", np.zeros(3, np.int64), r"got \[3\] int64"),
        ("positions", np.zeros((2, 1), np.int64), r"got \[2, 1\] int64"),
        ("sampling", _core.Sampling(np.ones(3, np.float32), np.arange(3, dtype=np.uint64)), "expected 2 requests"),
    ],
)
def test_draft_chain_wrong_array_raises_shape_error(case: HeadCase, name: str, value: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        _core.draft_chain(**{**good_chain(case), name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("anchors", np.array([0, 50]), r"anchors\[1\] is 50, expected 0 <= value < 50"),
        ("anchors", np.array([-1, 0]), r"anchors\[0\] is -1"),
        ("positions", np.array([0, -3]), r"positions\[1\] is -3"),
        ("positions", np.array([0, 2**60]), "positions"),
        ("num_candidates", 21, "num_candidates"),
        ("num_candidates", -1, "num_candidates"),
        ("num_steps", 4, "num_steps"),
        ("acceptance", "lucky", "acceptance must be"),
    ],
)
def test_draft_chain_wrong_value_raises_native_error(case: HeadCase, name: str, value: Any, message: str) -> None:
    with pytest.raises(NativeError, match=message) as caught:
        _core.draft_chain(**{**good_chain(case), name: value})
    assert caught.value.op == "draft_chain"
    assert caught.value.code != 0


def test_draft_chain_gated_without_hidden_raises_native_error() -> None:
    case = head_case(np.random.default_rng(0), "gated", vocab=50, draft_vocab=20)
    with pytest.raises(NativeError, match="hidden is missing"):
        _core.draft_chain(**good_chain(case))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"temperature": np.array([np.nan, 1], np.float32)}, NativeError, "request 0: temperature"),
        ({"temperature": np.array([1, -1], np.float32)}, NativeError, "request 1: temperature"),
        ({"temperature": np.array([1, np.inf], np.float32)}, NativeError, "request 1: temperature"),
        ({"top_k": np.array([0, -1])}, NativeError, "request 1: top_k"),
        ({"top_p": np.array([1, 0], np.float32)}, NativeError, "request 1: top_p"),
        ({"top_p": np.array([np.nan, 1], np.float32)}, NativeError, "request 0: top_p"),
        ({"seed": np.zeros(2, np.int64)}, ShapeError, r"seed: expected \[R=2\] uint64"),
        ({"top_p": np.ones(3, np.float32)}, ShapeError, r"top_p: expected \[R=2\]"),
    ],
)
def test_sampling_bad_parameters_are_refused(
    arguments: dict[str, np.ndarray], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {"temperature": np.ones(2, np.float32), "seed": np.zeros(2, np.uint64)}
    with pytest.raises(error, match=message):
        _core.Sampling(**{**good, **arguments})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w1": None}, NativeError, "w1 is missing"),
        ({"w2": np.zeros((20, 5), np.float32)}, ShapeError, r"w2: expected \[Vd=20, r=4\]"),
        ({"w1": np.full((50, 4), np.nan, np.float32)}, NativeError, "not finite"),
        ({"w1": np.zeros((50, 4), np.int8)}, ShapeError, "int8"),
        ({"w1_scale": np.ones(50, np.float32)}, NativeError, "w1_scale is only for a int8 head"),
        ({"gate_weight": np.ones((4, 9), np.float32)}, NativeError, "only for a gated head"),
        ({"d2t": None}, NativeError, "d2t is missing"),
        ({"d2t": np.zeros(20, np.int64)}, NativeError, "names target id 0 twice"),
        ({"d2t": np.arange(31, 51)}, NativeError, r"d2t\[19\] is 50"),
        ({"kind": "quantum"}, NativeError, "kind must be"),
        ({"kind": "none"}, NativeError, "w1 is only for a Markov head"),
        ({"confidence_weight": np.ones(4, np.float32)}, ShapeError, "confidence_weight"),
        ({"confidence_bias": np.ones(2, np.float32)}, ShapeError, "confidence_bias"),
        ({"vocab_size": 0}, NativeError, "vocab_size"),
        ({"draft_vocab_size": 51}, NativeError, "draft_vocab_size"),
    ],
)
def test_draft_heads_bad_weights_are_refused(
    case: HeadCase, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    good = {"vocab_size": case.vocab, "draft_vocab_size": case.draft_vocab, **case.arguments}
    with pytest.raises(error, match=message):
        _core.DraftHeads(**{**good, **change})


def test_confidence_without_weights_raises_native_error() -> None:
    heads = _core.DraftHeads(vocab_size=5, draft_vocab_size=5, kind="none")
    assert not heads.has_confidence
    with pytest.raises(NativeError, match="no confidence weights"):
        _core.confidence(heads, np.zeros((1, 1, 3), np.float32), np.zeros(1, np.int64), np.zeros((1, 1), np.int64))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target_logits": np.zeros((5, 50), np.float32)}, ShapeError, r"sum\(1 \+ verify_len\)=6"),
        ({"target_logits": np.zeros((6, 49), np.float32)}, ShapeError, "V=50"),
        ({"verify_len": np.array([4, 0])}, NativeError, r"verify_len\[0\] is 4"),
        ({"verify_len": np.array([-1, 0])}, NativeError, r"verify_len\[0\] is -1"),
        ({"draft_rows": np.array([0, 2])}, NativeError, r"draft_rows\[1\] is 2"),
        ({"draft_tokens": np.zeros((2, 3), np.int64)}, NativeError, "not both"),
        ({"acceptance": "greedy"}, NativeError, "another acceptance mode"),
        ({"draft": object()}, ShapeError, "a Draft"),
        ({"draft": None}, NativeError, "verify_len"),
    ],
)
def test_accept_ragged_bad_arguments_are_refused(
    case: HeadCase, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    chain = good_chain(case)
    good = {
        "target_logits": np.zeros((6, 50), np.float32),
        "verify_len": np.array([3, 1]),
        "positions": chain["positions"],
        "sampling": chain["sampling"],
        "draft": _core.draft_chain(**chain),
    }
    with pytest.raises(error, match=message):
        _core.accept_ragged(**{**good, **change})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "psychic"}, NativeError, "mode must be"),
        ({"mode": "fixed"}, NativeError, "draft_len is missing"),
        ({"mode": "fixed", "draft_len": 4}, NativeError, "draft_len"),
        ({"mode": "threshold", "threshold": 0.5, "confidence": None}, NativeError, "confidence is missing"),
        ({"mode": "threshold"}, NativeError, "threshold is missing"),
        ({"mode": "threshold", "threshold": 1.5}, NativeError, r"threshold must be in \[0, 1\]"),
        ({"mode": "threshold", "threshold": float("nan")}, NativeError, "threshold"),
        ({"mode": "stale_topk"}, NativeError, "budget is missing"),
        ({"mode": "stale_topk", "budget": -1}, NativeError, "budget"),
        ({"mode": "early_stop", "step_time_us": np.ones(8, np.float32)}, ShapeError, "at least 9 entries"),
        ({"mode": "early_stop", "load_scale": float("nan")}, NativeError, "load_scale"),
        ({"mode": "early_stop", "fixed_time_us": -1.0}, NativeError, "fixed_time_us"),
        ({"mode": "early_stop", "extra_tokens": -1}, NativeError, "extra_tokens"),
        ({"mode": "early_stop", "token_budget": -1}, NativeError, "token_budget"),
        ({"mode": "early_stop", "caps": np.array([1, -1])}, NativeError, r"caps\[1\] is -1"),
    ],
)
def test_schedule_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"num_requests": 2, "max_draft_len": 3, "confidence": np.ones((2, 3), np.float32)}
    with pytest.raises(error, match=message):
        _core.schedule_prefixes(**{**good, **arguments})


def test_pack_tokens_too_small_padding_is_refused() -> None:
    two = np.zeros(2, np.int64)
    with pytest.raises(NativeError, match="pad_to is 3 but the round has 4 tokens"):
        _core.pack_tokens(two, np.zeros((2, 3), np.int64), np.array([1, 1]), two, pad_to=3)


def test_row_masses_of_a_bad_row_raises_native_error() -> None:
    for row in ([0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]):
        with pytest.raises(NativeError, match="row_masses"):
            _core.row_masses(np.array(row, np.float32), 1.0)


def test_simd_level_unknown_is_refused() -> None:
    with pytest.raises(NativeError, match="level must be"):
        _core.set_simd_level("mmx")  # type: ignore[arg-type]
