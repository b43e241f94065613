"""Schedules and packing against the NumPy twins."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.random_schedules import random_cases

from trtllm_dspark import _core
from trtllm_dspark.reference import packing
from trtllm_dspark.reference.bits import schedule as twin


def test_schedules_equal_twins_on_random_cases() -> None:
    for case in random_cases(3000, seed=5, max_requests=12):
        num_requests, gamma = case.confidence.shape
        common = {"num_requests": num_requests, "max_draft_len": gamma, "caps": case.caps}
        survival = twin.survival_grid(case.confidence, case.caps)
        theta = twin.throughputs(
            survival,
            case.step_time_us,
            load_scale=case.load_scale,
            extra_tokens=case.extra_tokens,
            fixed_time_us=case.fixed_time_us,
        )
        early = _core.schedule_prefixes("early_stop", confidence=case.confidence, **common, **case.costs())
        assert early.verify_len.tolist() == twin.early_stop(survival, theta, case.token_budget), case
        budget, _ = _core.verify_budget(case.confidence, caps=case.caps, **case.costs())
        assert budget == twin.verify_budget(theta, case.token_budget), case
        for chosen in {0, budget, 3}:
            stale = _core.schedule_prefixes(
                "stale_topk", confidence=case.confidence, budget=chosen, token_budget=case.token_budget, **common
            )
            assert stale.verify_len.tolist() == twin.stale_topk(survival, chosen, case.token_budget), case
        for minimum in (0.0, 0.3, 1.0):
            cut = _core.schedule_prefixes(
                "threshold", confidence=case.confidence, threshold=minimum, token_budget=case.token_budget, **common
            )
            assert cut.verify_len.tolist() == twin.threshold(survival, minimum, case.token_budget), case
        caps = [gamma] * num_requests if case.caps is None else case.caps.tolist()
        fixed = _core.schedule_prefixes("fixed", draft_len=gamma // 2, token_budget=case.token_budget, **common)
        assert fixed.verify_len.tolist() == twin.fixed(gamma // 2, caps, case.token_budget), case


def test_schedule_of_a_large_batch_equals_twin() -> None:
    rng = np.random.default_rng(1)
    confidence = np.round(rng.random((256, 7), np.float32), 2)
    table = (1000 + 0.8 * np.arange(256 * 8 + 1)).astype(np.float32)
    got = _core.schedule_prefixes(
        "early_stop", num_requests=256, max_draft_len=7, confidence=confidence, step_time_us=table
    )
    survival = twin.survival_grid(confidence)
    assert got.verify_len.tolist() == twin.early_stop(survival, twin.throughputs(survival, table))
    assert 0 < got.verify_len.sum() < 256 * 7


@pytest.mark.parametrize(
    ("table", "warning"),
    [
        (None, "missing_cost_table"),
        ([0, 1, 1, np.nan, 1, 1], "bad_cost_table"),
        ([0, 1, 1, -2, 1, 1], "bad_cost_table"),
        ([0, 1, np.inf, 2, 2, 2], "bad_cost_table"),
        ([0, 5, 5, 5, 5, 5], "flat_cost_table"),
    ],
)
def test_schedule_unusable_cost_table_is_reported(table: list[float] | None, warning: str) -> None:
    step_time = None if table is None else np.array(table, np.float32)
    confidence = np.full((1, 4), 0.5, np.float32)
    got = _core.schedule_prefixes(
        "early_stop", num_requests=1, max_draft_len=4, confidence=confidence, step_time_us=step_time
    )
    assert got.warnings == (warning,)
    assert got.verify_len.tolist() == [4]
    assert _core.verify_budget(confidence, step_time_us=step_time) == (4, (warning,))


def test_schedule_odd_confidences_are_reported() -> None:
    confidence = np.array([[np.nan, 1.0], [1.5, -0.5]], np.float32)
    got = _core.schedule_prefixes("threshold", num_requests=2, max_draft_len=2, confidence=confidence, threshold=0.0)
    assert got.warnings == ("nan_confidence", "confidence_out_of_range")
    assert got.verify_len.tolist() == [0, 1]
    assert got.num_candidates == 1


def test_schedule_of_an_empty_batch_is_empty() -> None:
    empty = np.zeros((0, 3), np.float32)
    for mode in ("fixed", "threshold", "early_stop", "stale_topk"):
        got = _core.schedule_prefixes(
            mode, num_requests=0, max_draft_len=3, confidence=empty, draft_len=1, threshold=0.5, budget=1,
            step_time_us=np.ones(1, np.float32),
        )  # fmt: skip
        assert got.verify_len.shape == (0,)
        assert got.warnings == ()


def test_pack_tokens_equals_reference() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        num_requests, gamma = int(rng.integers(0, 6)), int(rng.integers(1, 5))
        anchors, positions = rng.integers(0, 99, num_requests), rng.integers(0, 999, num_requests)
        drafts, lengths = rng.integers(0, 99, (num_requests, gamma)), rng.integers(0, gamma + 1, num_requests)
        pad_to = int(np.sum(1 + lengths) + rng.integers(0, 4))
        got = _core.pack_tokens(anchors, drafts, lengths, positions, pad_to=pad_to)
        expected = packing.pack_tokens(anchors, drafts, lengths, positions, pad_to=pad_to)
        for name in ("cu_tokens", "token_ids", "token_request", "token_position"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), name)
        padding = got.token_request[int(got.cu_tokens[-1]) :]
        assert (padding == -1).all()
