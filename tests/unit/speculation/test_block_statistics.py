"""The core's statistics of requests equal those of array operations, through requests that join, rest and leave."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers.numpy_statistics import NumpyBlockStatistics, PlainStandings

from trtllm_dspark import _core
from trtllm_dspark.errors import NativeError, ShapeError
from trtllm_dspark.speculation.bypass import standings
from trtllm_dspark.speculation.controller_gain import THRESHOLDS, block_statistics
from trtllm_dspark.speculation.request_rows import RequestRows

GAMMA = 7
DEAR = np.arange(GAMMA + 2, dtype=np.float32) * 100
"""Of a batch of one: every token takes as long as the first."""
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
            base, marginal = np.float32(rng.uniform(0.5, 2.0, 2))
            means = core.evaluate(rows, caps, curve, draft_us, base=float(base), marginal=float(marginal))
            plain = curve[len(rows)]
            worth, *expected = arrays.evaluate(rows, caps, base * plain + marginal * (curve - plain), draft_us)
            np.testing.assert_allclose(core.worth(rows), worth, **CLOSE)
            assert means == pytest.approx(expected, rel=1e-12, abs=1e-12)
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


@pytest.mark.parametrize("seed", range(3))
def test_verdicts_and_lengths_equal_those_of_array_operations(seed: int) -> None:
    """Of every round: who rests, what the others gain, and how many drafts are verified."""
    rng = np.random.default_rng(seed)
    core, arrays = block_statistics(GAMMA), NumpyBlockStatistics(GAMMA)
    judge, plain = standings(), PlainStandings()
    for row in range(30):
        for one in (core, arrays, judge, plain):
            one.reset(row)
    events = dict.fromkeys(("rests", "entered", "fresh", "cut", "tested"), 0)
    for number in range(400):
        if rng.random() < 0.3:
            row = int(rng.integers(30))
            for one in (core, arrays, judge, plain):
                one.reset(row)
        rows = rng.permutation(30)[: rng.integers(1, 31)]
        count = len(rows)
        confidence = chances(rng, count, GAMMA) * np.float32(1.0 if number // 50 % 2 else 0.6)
        if not core.empty:
            caps = rng.integers(0, GAMMA + 1, count)
            caps[0] = GAMMA
            curve = np.arange(count * (GAMMA + 1) + 1, dtype=np.float32) + np.float32(3 * count)
            core.evaluate(rows, caps, curve, 1.0 * count)
            worth, *_ = arrays.evaluate(rows, caps, curve, 1.0 * count)
            if rng.random() < 0.1:
                judge.meet(rows)
                plain.meet(rows)
            verdict = judge.judge(rows, caps, core)
            resting, *found = plain.judge(rows, caps, worth[0], arrays.blocks(rows))
            assert [verdict.num_judged, verdict.entered, verdict.fresh] == found
            assert verdict.num_resting == len(resting)
            allowed = caps.copy()
            allowed[resting] = 0
            assert verdict.caps.tolist() == allowed.tolist()
            places = np.flatnonzero(allowed)
            assert verdict.span == (np.ptp(places) + 1 if len(places) else 0)
            gained = [verdict.extra_tokens, verdict.more_us]
            assert gained == pytest.approx(worth[1:, places].sum(axis=1).tolist(), rel=1e-12, abs=1e-12)
            asked = {"unknown": 0.5, "probed": int(rng.integers(-1, 30))}
            rows_asked = np.where(rng.random(count) < 0.1, -1, rows)
            free = core.verify_lens(rows_asked, caps, confidence, budget=1 << 20, unknown=0.5)
            budget = int(rng.integers(0, 2 * free.sum() + 2))
            lengths = core.verify_lens(rows_asked, caps, confidence, budget=budget, **asked)
            assert lengths.tolist() == arrays.verify_lens(rows_asked, caps, confidence, budget=budget, **asked).tolist()
            for event, happened in {
                "rests": verdict.num_resting > 0,
                "entered": verdict.entered,
                "fresh": verdict.fresh,
                "cut": lengths.sum() < free.sum(),
                "tested": bool((lengths > free).any()),
            }.items():
                events[event] += happened
        verify_len = rng.integers(0, GAMMA + 1, count)
        block = rows, confidence, verify_len, rng.integers(0, verify_len + 1)
        core.add(*block)
        arrays.add(*block)
    assert min(events.values()) > 3, events


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
    two.evaluate(row, row + 1, DEAR, 1.0)
    assert second.judge(row, row + 1, two).caps.tolist() == [0]
    two.reset(0)
    two.evaluate(row, row + 1, DEAR, 1.0)
    first.meet(row)
    assert first.judge(row, row + 1, two).caps.tolist() == [1]


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
    with pytest.raises(NativeError, match="row 0 was not evaluated"):
        judge.judge(row, row + 1, one)
    judge.reset(1)
    with pytest.raises(NativeError, match=r"rows\[0\] is 1"):
        judge.judge(row + 1, row + 1, one)
    with pytest.raises(ShapeError, match="confidence"):
        one.verify_lens(row, row, block[:, 1:].copy(), budget=1, unknown=0.5)
    with pytest.raises(NativeError, match="budget"):
        one.verify_lens(row, row, block, budget=-1, unknown=0.5)
    with pytest.raises(NativeError, match=r"caps\[0\] is -1"):
        one.verify_lens(row, row - 1, block, budget=1, unknown=0.5)
    weights = dict.fromkeys(("pool_memory", "ratio_memory", "hindsight_memory", "hindsight_found"), 0.5)
    counts = dict.fromkeys(("prior_blocks", "ratio_prior", "pool_drafts", "max_ratio", "hindsight_prior"), 1.0)
    with pytest.raises(NativeError, match="ascend"):
        _core.BlockStatistics(GAMMA, THRESHOLDS[::-1].copy(), memory=0.5, **weights, **counts)
    with pytest.raises(NativeError, match="memory is 2"):
        _core.BlockStatistics(GAMMA, THRESHOLDS, memory=2.0, **weights, **counts)
