"""Random confidence and schedule problems, what the core says, and running the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.core_kernels import schedule_live
from helpers.kernels.backends import Backend
from helpers.kernels.rounds import Outputs, Problem, launch
from trtllm_dspark import _core
from trtllm_dspark.plugins import ELEMENT_TYPES

Array = NDArray[Any]
MODES = {"fixed": 0, "threshold": 1, "early_stop": 2, "stale_topk": 3}
WARNINGS = ("missing_cost_table", "bad_cost_table", "flat_cost_table", "nan_confidence", "confidence_out_of_range")


@dataclass(frozen=True)
class ScheduleShape:
    """What a generated problem looks like."""

    num_requests: int = 5
    draft_len: int = 4
    hidden_size: int = 40
    vocab: int = 90
    mode: str = "early_stop"
    table: str = "staircase"  # or missing, short, flat, bad
    token_budget: int = -1
    markov: bool = True
    row_thresholds: bool = False
    riding_along: int = 0
    padding: int = 2
    seed: int = 0


@dataclass
class ScheduleCase:
    """Arrays of one problem."""

    shape: ScheduleShape
    hidden: Array
    heads: _core.DraftHeads
    hidden_weight: Array
    markov_table: Array | None
    bias: Array
    temperature: Array
    position_bias: Array
    anchors: Array
    positions: Array
    draft_tokens: Array
    caps: Array
    live: Array | None
    limits: Array
    terms: Array
    thresholds: Array | None
    step_time_us: Array | None


def make_schedule(shape: ScheduleShape) -> ScheduleCase:
    """Generate a problem; one request has no draft, caps cut some others."""
    random = np.random.default_rng(shape.seed)
    requests, gamma, d, rank = shape.num_requests, shape.draft_len, shape.hidden_size, 6
    w1 = random.normal(0, 1, (shape.vocab, rank)).astype(np.float32)
    weight = random.normal(0, 0.3, d + (rank if shape.markov else 0)).astype(np.float32)
    bias = random.normal(1, 0.1, 1).astype(np.float32)
    heads = _core.DraftHeads(
        vocab_size=shape.vocab, draft_vocab_size=shape.vocab, w1=w1, w2=w1, confidence_weight=weight,
        confidence_bias=bias, confidence_with_markov=shape.markov,
    )  # fmt: skip
    table = None
    if shape.markov:
        alone = _core.DraftHeads(
            vocab_size=shape.vocab, draft_vocab_size=shape.vocab, w1=w1, w2=w1,
            confidence_weight=np.concatenate([np.zeros(1, np.float32), weight[d:]]), confidence_with_markov=True,
        )  # fmt: skip
        table = _markov_table(alone, w1, weight[d:])
    draft_tokens = random.integers(0, shape.vocab, (requests, gamma)).astype(np.int32)
    draft_tokens[:1] = -1
    caps = random.integers(0, gamma + 1, requests).astype(np.int32)
    live: Array | None = None
    if shape.riding_along:
        # Any rows: a request may have ended in the round before.
        live = np.ones(requests, np.int32)
        live[random.permutation(requests)[: shape.riding_along]] = 0
        caps[live == 0] = 0
    longest = requests * (gamma + 1) + 3
    step_time: Array | None = (100 + 5.0 * (np.arange(longest + 1) // 4)).astype(np.float32)
    if shape.table == "missing":
        step_time = None
    elif shape.table == "short":
        step_time = step_time[: requests + 1]  # type: ignore[index]
    elif shape.table == "flat":
        step_time = np.full(longest + 1, 100, np.float32)
    elif shape.table == "bad":
        step_time = np.full(longest + 1, -1, np.float32)
    return ScheduleCase(
        shape=shape,
        hidden=random.normal(0, 1, (requests, gamma, d)).astype(np.float32),
        heads=heads,
        hidden_weight=np.ascontiguousarray(weight[:d]),
        markov_table=table,
        bias=bias,
        temperature=random.uniform(0.5, 2, gamma).astype(np.float32),
        position_bias=random.normal(0, 0.3, gamma).astype(np.float32),
        anchors=random.integers(0, shape.vocab, requests).astype(np.int32),
        positions=random.integers(0, 900, requests).astype(np.int32),
        draft_tokens=draft_tokens,
        caps=caps,
        live=live,
        limits=np.array([gamma - 1, 2 * requests, shape.token_budget, 3], np.int32),
        terms=np.array([0.25, 1.25, 30.0], np.float32),
        # Above 1 = no draft.
        thresholds=np.linspace(0.0, 1.25, requests, dtype=np.float32) if shape.row_thresholds else None,
        step_time_us=step_time,
    )


def _markov_table(heads: _core.DraftHeads, w1: Array, weight: Array) -> Array:
    """w_m . W1[v] in the core's order of summation: 16 lanes, then a tree (short rows fill one lane each)."""
    lanes = np.zeros((len(w1), 16), np.float32)
    for column in range(w1.shape[1]):
        exact = w1[:, column].astype(np.float64) * weight[column].astype(np.float64)
        lanes[:, column % 16] = (exact + lanes[:, column % 16]).astype(np.float32)
    for width in (8, 4, 2, 1):
        lanes[:, :width] = lanes[:, :width] + lanes[:, width : 2 * width]
    return np.ascontiguousarray(lanes[:, 0])


def run_schedule(backend: Backend, case: ScheduleCase) -> Outputs:
    """Launch `confidence_schedule` and return its outputs by name."""
    return launch(backend, "confidence_schedule", *schedule_problem(case))


def schedule_problem(case: ScheduleCase) -> Problem:
    """Parameters of `confidence_schedule`."""
    shape = case.shape
    requests, gamma = shape.num_requests, shape.draft_len
    rows = requests * (gamma + 1) + shape.padding
    scalars = {
        "num_requests": requests,
        "draft_len": gamma,
        "hidden_size": shape.hidden_size,
        "num_rows": rows,
        "table_len": 0 if case.step_time_us is None else len(case.step_time_us),
        "mode": MODES[shape.mode],
        "hidden_type": ELEMENT_TYPES["float32"],
    }
    inputs: dict[str, Array | None] = {
        "hidden": case.hidden,
        "hidden_weight": case.hidden_weight,
        "markov_table": case.markov_table,
        "confidence_bias": case.bias,
        "inv_temperature": (np.float32(1) / case.temperature).astype(np.float32),
        "position_bias": case.position_bias,
        "anchors": case.anchors,
        "positions": case.positions,
        "draft_tokens": case.draft_tokens,
        "caps": case.caps,
        "live": case.live,
        "limits": case.limits,
        "thresholds": case.thresholds,
        "terms": case.terms,
        "step_time_us": case.step_time_us,
    }
    outputs: dict[str, tuple[tuple[int, ...], Any] | None] = {
        "confidence": ((requests, gamma), np.float32),
        "survival": ((requests, gamma), np.int32),
        "verify_len": ((requests,), np.int32),
        "cu_tokens": ((requests + 1,), np.int32),
        "token_ids": ((rows,), np.int32),
        "token_request": ((rows,), np.int32),
        "token_position": ((rows,), np.int32),
        "report": ((4,), np.int32),
    }
    return scalars, inputs, outputs


def _alone(confidence: Array, row: int, case: ScheduleCase) -> int:
    """Verify length of one request under its own threshold."""
    assert case.thresholds is not None
    threshold = float(case.thresholds[row])
    if threshold > 1:
        return 0
    schedule = _core.schedule_prefixes(
        "threshold", num_requests=1, max_draft_len=case.shape.draft_len, confidence=confidence[row : row + 1],
        caps=case.caps[row : row + 1].astype(np.int64), threshold=threshold,
    )  # fmt: skip
    return int(schedule.verify_len[0])


def core_schedule(case: ScheduleCase) -> Outputs:
    """The same outputs from the core."""
    shape = case.shape
    confidence = _core.confidence(
        case.heads, case.hidden, case.anchors.astype(np.int64), case.draft_tokens.astype(np.int64),
        temperature=case.temperature, bias=case.position_bias,
    )  # fmt: skip
    # A table that does not cover the round counts as missing.
    table = None if shape.table in ("missing", "short") else case.step_time_us
    live = np.ones(shape.num_requests, bool) if case.live is None else case.live != 0
    caps = case.caps.astype(np.int64)
    common: dict[str, Any] = {
        "step_time_us": table,
        "token_budget": None if shape.token_budget < 0 else shape.token_budget,
        "load_scale": float(case.terms[1]),
        "fixed_time_us": float(case.terms[2]),
    }
    lengths, schedule = schedule_live(
        shape.mode,
        confidence,
        caps,
        live,
        max_draft_len=shape.draft_len,
        extra_tokens=int(case.limits[3]),
        draft_len=int(case.limits[0]) if shape.mode == "fixed" else None,
        threshold=float(case.terms[0]) if shape.mode == "threshold" else None,
        budget=int(case.limits[1]) if shape.mode == "stale_topk" else None,
        **common,
    )
    warnings, budget = set(schedule.warnings), 0
    if case.thresholds is not None:
        lengths = np.array([_alone(confidence, row, case) for row in range(shape.num_requests)], np.int64)
    if shape.mode == "stale_topk":
        others = int(case.limits[3] + (~live).sum())
        budget, more = _core.verify_budget(confidence[live], caps=caps[live], extra_tokens=others, **common)
        warnings |= set(more)
    rows = shape.num_requests * (shape.draft_len + 1) + shape.padding
    packed = _core.pack_tokens(
        case.anchors.astype(np.int64), case.draft_tokens.astype(np.int64), lengths,
        case.positions.astype(np.int64), pad_to=rows,
    )  # fmt: skip
    return {
        "confidence": confidence,
        "verify_len": lengths,
        "cu_tokens": packed.cu_tokens,
        "token_ids": packed.token_ids,
        "token_request": packed.token_request,
        "token_position": packed.token_position,
        "report": np.array(
            [
                sum(1 << bit for bit, name in enumerate(WARNINGS) if name in warnings),
                schedule.num_candidates,
                packed.cu_tokens[-1],
                budget,
            ]
        ),
    }
