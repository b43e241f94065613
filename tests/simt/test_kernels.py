"""Every kernel's source against the core, in three orders of threads and blocks, with guard pages behind all arrays."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.kernels.attention import AttentionShape
from helpers.kernels.backends import SimtBackend
from helpers.kernels.checks import (
    ATTENTIONS,
    ROUNDS,
    SCHEDULES,
    check_attention,
    check_attention_alone,
    check_round,
    check_schedule,
)
from helpers.kernels.round_cases import RoundShape
from helpers.kernels.schedule import ScheduleShape
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("shape", ROUNDS.values(), ids=ROUNDS.keys())
def test_round_any_order_equals_core(backend: SimtBackend, shape: RoundShape) -> None:
    check_round(backend, shape)


@pytest.mark.parametrize("shape", ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_attention_any_order_within_tolerance(backend: SimtBackend, shape: AttentionShape) -> None:
    check_attention(backend, shape)


@pytest.mark.parametrize("shape", ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_attention_any_order_does_not_depend_on_batch_mates(backend: SimtBackend, shape: AttentionShape) -> None:
    check_attention_alone(backend, shape)


@pytest.mark.parametrize("shape", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedule_any_order_equals_core(backend: SimtBackend, shape: ScheduleShape) -> None:
    check_schedule(backend, shape)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.builds(
        RoundShape,
        num_requests=st.integers(1, 12),
        draft_len=st.integers(1, 5),
        vocab=st.integers(64, 2600),
        draft_vocab=st.sampled_from([0, 64, 50]),
        rank=st.integers(1, 40),
        head_kind=st.sampled_from(["none", "vanilla", "gated", "rnn"]),
        acceptance=st.sampled_from(["greedy", "rejection", "coupled"]),
        num_candidates=st.sampled_from([0, 0, 1, 9, 50]),
        logits_type=st.sampled_from(["float32", "float16", "bfloat16"]),
        weight_type=st.sampled_from(["float32", "float16", "bfloat16", "int8"]),
        filters=st.booleans(),
        bad_rows=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    ),
    order=st.integers(0, 1000),
)
def test_round_generated_shape_equals_core(simt_path: Path, shape: RoundShape, order: int) -> None:
    backend = SimtBackend(simt_path, order)
    check_round(backend, shape)
    backend.close()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.builds(
        ScheduleShape,
        num_requests=st.integers(1, 64),
        draft_len=st.integers(1, 8),
        hidden_size=st.integers(1, 70),
        mode=st.sampled_from(["fixed", "threshold", "early_stop", "stale_topk"]),
        table=st.sampled_from(["staircase", "staircase", "missing", "short", "flat", "bad"]),
        token_budget=st.sampled_from([-1, -1, 0, 1, 20]),
        riding_along=st.integers(0, 9),
        seed=st.integers(0, 2**32 - 1),
    ),
    order=st.integers(0, 1000),
)
def test_schedule_generated_shape_equals_core(simt_path: Path, shape: ScheduleShape, order: int) -> None:
    backend = SimtBackend(simt_path, order)
    check_schedule(backend, shape)
    backend.close()
