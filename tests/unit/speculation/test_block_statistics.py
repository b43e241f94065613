"""The core's statistics of requests equal those of array operations, through requests that join, rest and leave."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
from helpers.numpy_statistics import NumpyBlockStatistics, PlainStandings
from helpers.virtual_rounds import table_of

from trtllm_dspark import _core
from trtllm_dspark.errors import NativeError, ShapeError
from trtllm_dspark.speculation.adaptive import AdaptivePolicy
from trtllm_dspark.speculation.bypass import standings
from trtllm_dspark.speculation.controller_gain import THRESHOLDS, block_statistics
from trtllm_dspark.speculation.drift import RoundCosts
from trtllm_dspark.speculation.request_rows import RequestRows

GAMMA = 7
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def chances(rng: np.random.Generator, count: int, gamma: int) -> np.ndarray:
    """Return confidences of all kinds: a level of each request, and some that are no numbers or out of range."""
    confidence = rng.random((count, 1)) ** 0.5 * rng.uniform(0.5, 1.2, (count, gamma))
    odd = rng.random((count, gamma)) < 0.02
    confidence[odd] = rng.choice([np.nan, -0.5, 0.0, 1.0, 1.5], odd.sum())
    return confidence.astype(np.float32)


@pytest.mark.parametrize("gamma", [1, 5, 7, 12])
@pytest.mark.parametrize("seed", range(3))
def test_gains_and_thresholds_equal_those_of_array_operations(gamma: int, seed: int) -> None:
    rng = np.random.default_rng([gamma, seed])
    core, arrays = block_statistics(gamma), NumpyBlockStatistics(gamma)
    num_rows, chosen = 0, set()
    for _ in range(150):
        while num_rows < 3 or (num_rows < 40 and rng.random() < 0.3):
            core.reset(num_rows)
            arrays.reset(num_rows)
            num_rows += 1
        if rng.random() < 0.1:
            row = int(rng.integers(num_rows))
            core.reset(row)
            arrays.reset(row)
        rows = rng.permutation(num_rows)[: rng.integers(1, num_rows + 1)]
        if not core.empty:
            curve = np.cumsum(rng.exponential(1.0, len(rows) * (gamma + 1) + 1)).astype(np.float32) + np.float32(5)
            caps = rng.integers(0, gamma + 1, len(rows))
            caps[0] = 1
            draft_us = float(rng.exponential(2.0))
            mine, other = (one.evaluate(rows, caps, curve, draft_us) for one in (core, arrays))
            np.testing.assert_allclose(mine[0], other[0], **CLOSE)
            assert mine[1:] == pytest.approx(other[1:], rel=1e-12, abs=1e-12)
            np.testing.assert_array_equal(core.thresholds(rows, 0.5), arrays.thresholds(rows, 0.5))
            chosen |= set(core.thresholds(rows, 0.5).tolist())
        verify_len = rng.integers(0, gamma + 1, len(rows))
        block = rows, chances(rng, len(rows), gamma), verify_len, rng.integers(0, verify_len + 1)
        core.add(*block)
        arrays.add(*block)
        every = np.arange(num_rows)
        np.testing.assert_allclose(core.blocks(every), arrays.blocks(every), **CLOSE)
        assert core.accepted_ratio == pytest.approx(arrays.accepted_ratio, rel=1e-12)
    assert len(chosen) > 3


@dataclass
class Round:
    requests: list[str]
    confidence: np.ndarray
    verify_len: np.ndarray
    accepted: np.ndarray
    ended: set[str] = field(default_factory=set)


def adaptive(gamma: int, *, core: bool) -> AdaptivePolicy:
    table = table_of(lambda r, t: 10_000.0 + 400.0 * (t - r), draft_us=1500.0)
    policy = AdaptivePolicy(RoundCosts(table, max_draft_len=gamma), max_draft_len=gamma)
    if not core:
        policy._blocks = NumpyBlockStatistics(gamma)  # type: ignore[assignment]
        policy._bypass._standings = PlainStandings()  # type: ignore[assignment]
        policy._rows = RequestRows(policy._blocks, policy._bypass)
    return policy


def observe(policies: list[AdaptivePolicy], done: Round, drafted: np.ndarray) -> None:
    live = np.array([request not in done.ended for request in done.requests])
    places = np.flatnonzero(drafted & live)
    if len(places):
        for policy in policies:
            policy.observe(
                done.requests, places, done.confidence[places], done.verify_len[places], done.accepted[places]
            )


@pytest.mark.parametrize("behind", [0, 1], ids=["observed at once", "observed a round later"])
@pytest.mark.parametrize("seed", range(4))
def test_decisions_equal_those_of_array_operations(seed: int, behind: int) -> None:
    """Requests join, leave, change their text, ask for nothing, change places, rest and are probed."""
    rng = np.random.default_rng([seed, behind])
    policies = [adaptive(GAMMA, core=True), adaptive(GAMMA, core=False)]
    levels: dict[str, float] = {}
    batch: list[str] = []
    flying: list[tuple[Round, np.ndarray]] = []
    reasons: set[str] = set()
    rested = 0
    for number in range(500):
        # For a while nobody's drafts are accepted.
        poor = 150 <= number < 300
        texts = [0.05] if poor else [0.05, 0.3, 0.6, 0.9]
        while not batch or (len(batch) < 8 and rng.random() < 0.05):
            batch.append(f"r{number}.{len(batch)}")
            levels[batch[-1]] = float(rng.choice(texts))
        if rng.random() < 0.05 and len(batch) > 1:
            gone = batch.pop(int(rng.integers(len(batch))))
            for policy in policies:
                policy.forget(gone)
            for waiting, _ in flying:
                waiting.ended.add(gone)
        if rng.random() < 0.05:
            batch.reverse()
        if number in (150, 300):
            levels.update((name, float(rng.choice(texts))) for name in batch)
        if rng.random() < 0.02 and not poor:
            levels[batch[0]] = float(rng.random())
        requests, count = list(batch), len(batch)
        caps = np.where(rng.random(count) < 0.05, 0, GAMMA)
        caps[int(rng.integers(count))] = GAMMA
        scale = 1.0 + (number // 50) % 2
        plans = [policy.plan(requests, caps, 128, scale) for policy in policies]
        assert plans[0][0] == plans[1][0]
        np.testing.assert_array_equal(plans[0][1], plans[1][1])
        np.testing.assert_array_equal(*(policy.thresholds(requests) for policy in policies))
        worth = [policy._worth for policy in policies]
        if worth[0] is not None and worth[1] is not None:
            np.testing.assert_allclose(worth[0], worth[1], **CLOSE)
            rested += int(np.count_nonzero(plans[0][1]) < np.count_nonzero(caps))
        assert [policy.bypassed for policy in policies] == [policies[0].bypassed] * 2
        reason, allowed = plans[0]
        reasons.add(reason)
        drafted = (allowed > 0) & (reason in ("speculate", "probe"))
        confidence = np.clip(
            np.array([[levels[name]] for name in requests]) * rng.uniform(0.8, 1.2, (count, GAMMA)), 0, 1
        ).astype(np.float32)
        lengths = np.zeros(count, np.int64)
        if drafted.any():
            budget = int(rng.integers(1, count * GAMMA + 1))
            found = [
                policy.verify_lens(
                    requests, caps=allowed, confidence=confidence, budget=budget, probing=reason == "probe"
                )
                for policy in policies
            ]
            np.testing.assert_array_equal(*found)
            lengths = found[0]
        accepted = np.minimum(lengths, rng.geometric(1.0 - np.array([0.95 * levels[name] for name in requests])) - 1)
        flying.append((Round(requests, confidence, lengths, accepted), drafted))
        while len(flying) > behind:
            observe(policies, *flying.pop(0))
    assert {"speculate", "bypass", "probe"} <= reasons
    assert rested > 0
    for policy in policies:
        for name in batch:
            policy.forget(name)
        assert len(policy._rows) == 0


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_a_dictionary_and_never_shared(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fresh: list[int] = []

    class Noting:
        def reset(self, row: int) -> None:
            fresh.append(row)

    rows, known = RequestRows(Noting()), dict[str, int]()
    for _ in range(400):
        names = [f"r{number}" for number in rng.permutation(12)[: rng.integers(0, 6)]]
        kind = rng.integers(3)
        if kind == 0 and names:
            rows.release(names[0])
            known.pop(names[0], None)
        elif kind == 1:
            fresh.clear()
            taken = rows.take(names)
            joined = [row for name, row in zip(names, taken.tolist(), strict=True) if name not in known]
            assert fresh == joined
            assert rows.complete
            known.update(zip(names, taken.tolist(), strict=True))
        else:
            assert rows.of(names).tolist() == [known.get(name, -1) for name in names]
            assert rows.complete == all(name in known for name in names)
        assert len(rows) == len(known) == len(set(known.values()))
        assert max(known.values(), default=0) < 12


def test_rows_of_the_same_batch_are_looked_up_once() -> None:
    rows = RequestRows()
    taken = rows.take(["a", "b"])
    assert rows.of(["a", "b"]) is taken
    assert rows.take(("a", "b")) is taken
    assert rows.of(["b", "a"]).tolist() == taken[::-1].tolist()
    rows.release("b")
    assert rows.of(["b", "a"]).tolist() == [-1, taken[0]]


def test_a_copy_goes_its_own_way() -> None:
    one = block_statistics(GAMMA)
    one.reset(0)
    two = copy.deepcopy(one)
    row, none = np.zeros(1, np.int64), np.zeros(1, np.int64)
    two.add(row, np.full((1, GAMMA), 0.5, np.float32), none, none)
    assert one.empty
    assert not two.empty
    first = standings()
    first.reset(0)
    second = copy.deepcopy(first)
    poor = np.array([-0.5])
    assert second.judge(row, row + 1, poor, poor)[0].tolist() == [0]
    first.meet(row)
    assert first.judge(row, row + 1, poor, np.zeros(1))[0].tolist() == []


def test_statistics_refuse_what_they_cannot_use() -> None:
    one = block_statistics(GAMMA)
    row, block = np.zeros(1, np.int64), np.ones((1, GAMMA), np.float32)
    with pytest.raises(NativeError, match=r"rows\[0\] is 0"):
        one.add(row, block, row, row)
    with pytest.raises(NativeError, match="row"):
        one.reset(1)
    one.reset(0)
    with pytest.raises(NativeError, match="no block was added yet"):
        one.evaluate(row, row, np.ones(GAMMA + 2, np.float32), 1.0)
    with pytest.raises(ShapeError, match="confidence"):
        one.add(row, block[:, 1:].copy(), row, row)
    with pytest.raises(NativeError, match="verify_len"):
        one.add(row, block, row + GAMMA + 1, row)
    one.add(row, block, row, row)
    with pytest.raises(ShapeError, match="verify_us"):
        one.evaluate(row, row, np.ones(GAMMA + 1, np.float32), 1.0)
    judge = standings()
    judge.reset(0)
    with pytest.raises(ShapeError, match="gains"):
        judge.judge(row, row, np.zeros(1, np.float32), np.zeros(1))  # type: ignore[arg-type]
    weights = dict.fromkeys(("pool_memory", "ratio_memory", "hindsight_memory", "hindsight_found"), 0.5)
    counts = dict.fromkeys(("prior_blocks", "ratio_prior", "pool_drafts", "max_ratio", "hindsight_prior"), 1.0)
    with pytest.raises(NativeError, match="ascend"):
        _core.BlockStatistics(GAMMA, THRESHOLDS[::-1].copy(), memory=0.5, **weights, **counts)
    with pytest.raises(NativeError, match="memory is 2"):
        _core.BlockStatistics(GAMMA, THRESHOLDS, memory=2.0, **weights, **counts)
