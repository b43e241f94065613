"""Greedy and coupled requests get the same bits alone, in a batch of seven, and in a permuted batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.toy_loop import Scheduler, Tables, accept_with_core, decode, random_tables

from trtllm_dspark import _core

NUM_TOKENS = 24
SIZE = 7
STEP_TIME = np.array([0, *(20 + b + 2 * (b // 4) for b in range(1, SIZE * 5 + 1))], np.float32)


@dataclass(frozen=True)
class Batch:
    """Requests of one batch: who they are, not where they stand."""

    seed: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    before: np.ndarray
    anchor: np.ndarray

    def take(self, rows: list[int]) -> Batch:
        return Batch(*(np.ascontiguousarray(getattr(self, name)[rows]) for name in self.__dataclass_fields__))

    def sampling(self) -> _core.Sampling:
        return _core.Sampling(self.temperature, self.seed, self.top_k, self.top_p)


@pytest.fixture(scope="module", params=["vanilla", "none"])
def tables(request: pytest.FixtureRequest) -> Tables:
    return random_tables(11, vocab=40, gamma=4, kind=request.param)


def batch(greedy: bool) -> Batch:
    rng = np.random.default_rng(12)
    return Batch(
        seed=rng.integers(0, 2**63, SIZE, np.int64).astype(np.uint64),
        temperature=np.zeros(SIZE, np.float32) if greedy else rng.uniform(0.3, 1.2, SIZE).astype(np.float32),
        top_k=np.array([0, 5, 0, 0, 12, 1, 40]),
        top_p=np.array([1, 1, 0.9, 0.5, 0.8, 1, 1], np.float32),
        before=rng.integers(0, 40, SIZE),
        anchor=rng.integers(0, 40, SIZE),
    )


def run(tables: Tables, requests: Batch, acceptance: str, mode: str) -> tuple[np.ndarray, list[int]]:
    scheduler = Scheduler(mode, SIZE, step_time_us=STEP_TIME)
    tokens = decode(
        tables, requests.sampling(), scheduler, accept_with_core(acceptance), NUM_TOKENS, acceptance=acceptance,
        first=(requests.before, requests.anchor),
    )  # fmt: skip
    return tokens, scheduler.verified


@pytest.mark.parametrize("mode", ["fixed", "threshold", "early_stop", "stale_topk"])
@pytest.mark.parametrize(
    ("acceptance", "greedy"), [("coupled", False), ("greedy", False), ("rejection", True), ("coupled", True)]
)
def test_output_does_not_depend_on_batch_mates(tables: Tables, acceptance: str, greedy: bool, mode: str) -> None:
    requests = batch(greedy)
    together, verified = run(tables, requests, acceptance, mode)
    assert sum(verified) > 0
    order = [3, 0, 6, 1, 5, 2, 4]
    permuted, _ = run(tables, requests.take(order), acceptance, mode)
    assert np.array_equal(permuted, together[order])
    for r in range(SIZE):
        alone, _ = run(tables, requests.take([r]), acceptance, mode)
        assert np.array_equal(alone[0], together[r]), f"request {r}"


def test_rejection_output_depends_on_what_mates_let_through(tables: Tables) -> None:
    """The documented limit of rejection mode, and proof that the schedules above do react to the batch."""
    requests = batch(greedy=False)
    together, _ = run(tables, requests, "rejection", "early_stop")
    alone = [run(tables, requests.take([r]), "rejection", "early_stop")[0][0] for r in range(SIZE)]
    assert any(not np.array_equal(one, row) for one, row in zip(alone, together, strict=True))


def test_rejection_with_a_request_local_schedule_does_not_depend_on_batch_mates(tables: Tables) -> None:
    requests = batch(greedy=False)
    together, _ = run(tables, requests, "rejection", "threshold")
    for r in range(SIZE):
        alone, _ = run(tables, requests.take([r]), "rejection", "threshold")
        assert np.array_equal(alone[0], together[r]), f"request {r}"
