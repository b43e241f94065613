"""No argument crashes the core: every call returns or raises an error of ours (or TypeError), nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from helpers.core_cases import head_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trtllm_dspark import _core
from trtllm_dspark.errors import NativeError, ShapeError
from trtllm_dspark.speculation.bypass import standings
from trtllm_dspark.speculation.controller_gain import block_statistics

VOCAB, DRAFT_VOCAB, HIDDEN = 11, 7, 5
SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = [np.float32, np.float64, np.int64, np.int32, np.uint64, np.int8, np.bool_]
ODD_NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 7, 64, 65, 2**31, 2**55, 2**62])


@st.composite
def odd_arrays(draw: Any) -> Any:
    """Draw an array of some dtype and shape (empty, read-only and strided ones too), or no array at all."""
    if draw(st.integers(0, 12)) == 0:
        return draw(st.sampled_from([None, 3, 1.5, "text", [1, 2], object()]))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 11, 20]), max_size=4))
    array = draw(hnp.arrays(dtype, tuple(shape), elements=elements(dtype)))
    kind = draw(st.integers(0, 5))
    if kind == 0 and array.ndim:
        return array[..., ::2]
    if kind == 1:
        return array.T
    if kind == 2:
        array.setflags(write=False)
    return array


def elements(dtype: Any) -> Any:
    kind = np.dtype(dtype).kind
    if kind == "f":
        return st.floats(width=32) | st.sampled_from([0.0, 1.0, 0.5])
    if kind == "i":
        return st.integers(-3, 12)
    return st.integers(0, 12) if kind == "u" else st.booleans()


def good(shape: tuple[int, ...], dtype: Any, low: int = 0, high: int = 7) -> np.ndarray:
    rng = np.random.default_rng(len(shape))
    if np.dtype(dtype).kind == "f":
        return rng.random(shape).astype(dtype)
    return rng.integers(low, high, shape).astype(dtype)


HEADS = [
    head_case(np.random.default_rng(1), kind, vocab=VOCAB, draft_vocab=DRAFT_VOCAB, rank=3, hidden=HIDDEN).native()
    for kind in ("none", "vanilla", "gated", "rnn")
]
SAMPLING = _core.Sampling(np.array([0, 1], np.float32), np.arange(2, dtype=np.uint64))
BASE = good((2, 3, DRAFT_VOCAB), np.float32)
TWO, HIDDEN_ROWS = np.array([1, 2]), good((2, 3, HIDDEN), np.float32)
DRAFT = _core.draft_chain(HEADS[1], BASE, TWO, TWO, SAMPLING)
BLOCKS, STANDINGS = block_statistics(3), standings()
for row in range(12):
    BLOCKS.reset(row)
    STANDINGS.reset(row)
BLOCKS.add(TWO, good((2, 3), np.float32), TWO, TWO)
BLOCKS.evaluate(TWO, TWO, good((9,), np.float32), 1.0)
ROWS = _core.SimulatedRows(np.array([1, 0, 1, 2]), np.array([1, 2, 0, 0]), by_token=True)
for block in range(2):
    ROWS.join(block, 100)
DRIFT_RULES = {
    **dict.fromkeys(("noise", "common", "ratio", "doubt", "shape", "memory", "flat"), 0.5),
    **dict.fromkeys(("surprise", "outlier", "base_bound", "marginal_bound", "draft_bound"), 3.0),
}
DRIFT = _core.CostDrift(**DRIFT_RULES)
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sampling": (
        _core.Sampling,
        {
            "temperature": good((2,), np.float32),
            "seed": good((2,), np.uint64),
            "top_k": TWO,
            "top_p": good((2,), np.float32),
        },
    ),
    "heads": (
        _core.DraftHeads,
        {
            "vocab_size": VOCAB,
            "draft_vocab_size": DRAFT_VOCAB,
            "kind": "vanilla",
            "w1": good((VOCAB, 3), np.float32),
            "w2": good((DRAFT_VOCAB, 3), np.float32),
            "w1_scale": None,
            "w2_scale": None,
            "gate_weight": None,
            "rnn_weight": None,
            "confidence_weight": good((8,), np.float32),
            "confidence_bias": good((1,), np.float32),
            "d2t": np.arange(DRAFT_VOCAB),
        },
    ),
    "draft_chain": (
        _core.draft_chain,
        {
            "heads": HEADS,
            "base_logits": BASE,
            "anchors": TWO,
            "positions": TWO,
            "sampling": SAMPLING,
            "hidden": HIDDEN_ROWS,
            "acceptance": ["greedy", "rejection", "coupled"],
            "num_candidates": 3,
            "num_steps": 2,
        },
    ),
    "confidence": (
        _core.confidence,
        {
            "heads": HEADS,
            "hidden": HIDDEN_ROWS,
            "anchors": TWO,
            "draft_tokens": good((2, 3), np.int64),
            "temperature": good((3,), np.float32) + np.float32(1),
            "bias": good((3,), np.float32),
        },
    ),
    "schedule_prefixes": (
        _core.schedule_prefixes,
        {
            "mode": ["fixed", "threshold", "early_stop", "stale_topk"],
            "num_requests": 2,
            "max_draft_len": 3,
            "confidence": good((2, 3), np.float32),
            "caps": TWO,
            "draft_len": 2,
            "threshold": 0.5,
            "step_time_us": good((20,), np.float32),
            "budget": 3,
            "token_budget": 4,
            "load_scale": 1.0,
            "extra_tokens": 1,
            "fixed_time_us": 0.0,
        },
    ),
    "verify_budget": (
        _core.verify_budget,
        {"confidence": good((2, 3), np.float32), "step_time_us": good((20,), np.float32), "caps": TWO},
    ),
    "accept_ragged": (
        _core.accept_ragged,
        {
            "target_logits": good((5, VOCAB), np.float32),
            "verify_len": np.array([2, 1]),
            "positions": TWO,
            "sampling": SAMPLING,
            "draft": [DRAFT, None],
            "draft_rows": [None, np.array([1, 0])],
            "draft_tokens": None,
            "acceptance": ["greedy", "rejection", "coupled"],
            "logprobs": [True, False],
        },
    ),
    "pack_tokens": (
        _core.pack_tokens,
        {"anchors": TWO, "draft_tokens": good((2, 3), np.int64), "verify_len": TWO, "positions": TWO, "pad_to": 9},
    ),
    "row_masses": (
        _core.row_masses,
        {"logits": good((9,), np.float32), "temperature": 1.0, "top_k": 2, "top_p": 0.5},
    ),
    "residual_masses": (_core.residual_masses, {"target": good((9,), np.uint64), "draft": good((9,), np.uint64)}),
    "pick": (_core.pick, {"masses": good((9,), np.uint64), "bits": 7}),
    "coupled_pick": (_core.coupled_pick, {"masses": good((9,), np.uint64), "seed": 1, "position": 2}),
    "exp2_exact": (_core.exp2_exact, {"x": good((9,), np.float32)}),
    "exponential_exact": (_core.exponential_exact, {"bits": good((9,), np.uint32)}),
    "masses": (DRAFT.masses, {"request": 0, "step": 0}),
    "blocks": (
        _core.BlockStatistics,
        {
            "max_draft_len": 3,
            "thresholds": np.sort(good((4,), np.float32)),
            **dict.fromkeys(("memory", "pool_memory", "ratio_memory", "hindsight_memory", "hindsight_found"), 0.5),
            **dict.fromkeys(("prior_blocks", "ratio_prior", "pool_drafts", "max_ratio", "hindsight_prior"), 1.0),
        },
    ),
    "blocks_reset": (BLOCKS.reset, {"row": 2}),
    "blocks_add": (
        BLOCKS.add,
        {
            "rows": TWO,
            "confidence": good((2, 3), np.float32),
            "verify_len": TWO,
            "accepted": TWO,
            "drafted": [None, TWO > 1],
        },
    ),
    "blocks_evaluate": (
        BLOCKS.evaluate,
        {
            "rows": TWO,
            "caps": TWO,
            "verify_us": good((9,), np.float32),
            "draft_us": 1.0,
            "base": 1.0,
            "marginal": 1.0,
        },
    ),
    "blocks_thresholds": (BLOCKS.thresholds, {"rows": TWO, "unknown": 0.5}),
    "blocks_blocks": (BLOCKS.blocks, {"rows": TWO}),
    "blocks_worth": (BLOCKS.worth, {"rows": TWO}),
    "blocks_verify_lens": (
        BLOCKS.verify_lens,
        {
            "rows": TWO,
            "caps": TWO,
            "confidence": good((2, 3), np.float32),
            "budget": 3,
            "unknown": 0.5,
            "probed": 1,
        },
    ),
    "standings": (
        _core.Standings,
        {"enter": 0.0, "leave": 0.1, "heavy_loss": 0.0, "smoothing": 0.1, "patience": 3, "heavy_weight": 2},
    ),
    "counts": (_core.RoundCounts, {"draft_len": 3, "most_recent": 2}),
    "counts_add": (
        _core.RoundCounts(3, most_recent=2).add,
        {"caps": TWO, "drafted": np.array([True, False]), "verify_len": TWO, "accepted": TWO, "budget": 3},
    ),
    "rows": (
        _core.SimulatedRows,
        {"accepted": np.array([1, 0, 2, 0]), "following": np.array([1, 2, 0, 0]), "by_token": [True, False]}
        | {"most_waiting": [1, 7]},
    ),
    "rows_caps": (ROWS.caps, {"most": 3}),
    "rows_confidence": (ROWS.confidence, {"of_blocks": good((4, 3), np.float32)}),
    "rows_advance": (ROWS.advance, {"verify_len": [TWO, None], "drafting": [TWO, None]}),
    "drift": (_core.CostDrift, DRIFT_RULES),
    "drift_verify": (DRIFT.observe_verify, {"first_us": 1.0, "more_us": 0.5, "measured_us": 2.0}),
    "drift_draft": (DRIFT.observe_draft, {"draft_us": 1.0, "measured_us": 2.0}),
    "drift_round": (DRIFT.observe_round, {"first_us": 1.0, "more_us": 0.5, "draft_us": 1.0, "measured_us": 2.0}),
    "standings_meet": (STANDINGS.meet, {"rows": TWO}),
    "standings_judge": (
        STANDINGS.judge,
        {"rows": TWO, "caps": TWO, "blocks": BLOCKS},
    ),
}


@pytest.mark.parametrize("name", CALLS)
@SETTINGS
@given(data=st.data())
def test_core_odd_arguments_return_or_raise(name: str, data: st.DataObject) -> None:
    call, template = CALLS[name]
    arguments = {key: data.draw(st.sampled_from(v)) if isinstance(v, list) else v for key, v in template.items()}
    for key in data.draw(st.lists(st.sampled_from(list(template)), max_size=2)):
        value = arguments[key]
        if isinstance(value, np.ndarray) or value is None:
            arguments[key] = data.draw(odd_arrays())
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int):
            arguments[key] = data.draw(ODD_NUMBERS)
        elif isinstance(value, float):
            arguments[key] = data.draw(st.floats())
    # A TypeError is nanobind's: a number outside its C++ type, or an object where a number belongs.
    with suppress(ShapeError, NativeError, TypeError):
        call(**arguments)
