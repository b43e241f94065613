"""The adaptive policy decides what array operations over whole batches decide, round by round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.numpy_adaptive import NumpyAdaptivePolicy
from helpers.virtual_rounds import table_of

from trtllm_dspark.speculation.adaptive import AdaptivePolicy
from trtllm_dspark.speculation.drift import RoundCosts

GAMMA = 7
ROUNDS = 900


@dataclass
class Round:
    """A round under way."""

    requests: list[str]
    drafted: np.ndarray
    confidence: np.ndarray
    verify_len: np.ndarray
    accepted: np.ndarray


class Traffic:
    """Requests that join and leave, change their text and their places; for a while all their drafts are poor."""

    def __init__(self, rng: np.random.Generator, most: int) -> None:
        self.rng, self.most = rng, most
        self.levels: dict[str, float] = {}
        self.batch: list[str] = []
        self.num_joined = 0

    def step(self, number: int) -> list[str]:
        """Move on by a round; return who has left."""
        poor = ROUNDS // 4 <= number < ROUNDS // 2
        texts = [0.05] if poor else [0.05, 0.3, 0.6, 0.9]
        left = [name for name in self.batch if self.rng.random() < 0.01]
        self.batch = [name for name in self.batch if name not in left]
        while not self.batch or (len(self.batch) < self.most and self.rng.random() < 0.1):
            self.num_joined += 1
            self.batch.append(f"r{self.num_joined}")
            self.levels[self.batch[-1]] = float(self.rng.choice(texts))
        if self.rng.random() < 0.05:
            self.batch.reverse()
        if number in (ROUNDS // 4, ROUNDS // 2):
            self.levels.update((name, float(self.rng.choice(texts))) for name in self.batch)
        if self.rng.random() < 0.02 and not poor:
            self.levels[self.batch[0]] = float(self.rng.random())
        return left

    def chances(self) -> np.ndarray:
        return np.array([self.levels[name] for name in self.batch])


class SideBySide:
    """The policy and its oracle, asked the same; an answer that differs fails."""

    def __init__(self, costs: RoundCosts) -> None:
        self.core = AdaptivePolicy(costs, max_draft_len=GAMMA)
        self.arrays = NumpyAdaptivePolicy(costs, max_draft_len=GAMMA)

    def plan(self, requests: list[str], caps: np.ndarray, cost_scale: float) -> tuple[str, np.ndarray]:
        before = caps.copy()
        (reason, allowed), (expected, others) = (
            policy.plan(requests, caps, 128, cost_scale) for policy in (self.core, self.arrays)
        )
        assert reason == expected
        np.testing.assert_array_equal(allowed, others)
        np.testing.assert_array_equal(caps, before)
        np.testing.assert_array_equal(self.core.thresholds(requests), self.arrays.thresholds(requests))
        assert self.core.bypassed == self.arrays.bypassed
        assert self.core.accepted_ratio == pytest.approx(self.arrays.accepted_ratio, rel=1e-12)
        assert self.core.threshold == pytest.approx(self.arrays.threshold, rel=1e-12)
        if self.core.gain is None or self.arrays.gain is None:
            assert self.core.gain is self.arrays.gain
        else:
            assert self.core.gain == pytest.approx(self.arrays.gain, rel=1e-9, abs=1e-12)
        return reason, allowed

    def verify_lens(self, requests: list[str], caps: np.ndarray, confidence: np.ndarray, budget: int) -> np.ndarray:
        lengths, expected = (
            policy.verify_lens(requests, caps=caps, confidence=confidence, budget=budget)
            for policy in (self.core, self.arrays)
        )
        np.testing.assert_array_equal(lengths, expected)
        return lengths

    def observe(self, done: Round) -> None:
        for policy in (self.core, self.arrays):
            policy.observe(done.requests, done.drafted, done.confidence, done.verify_len, done.accepted)

    def forget(self, request: str) -> None:
        self.core.forget(request)
        self.arrays.forget(request)


@pytest.mark.parametrize("behind", [0, 1], ids=["observed at once", "observed a round later"])
@pytest.mark.parametrize("most", [1, 2, 8, 64])
def test_decisions_equal_those_of_array_operations(most: int, behind: int) -> None:
    """Requests join, leave, ask for nothing, rest and are probed; budgets, costs and their drift move."""
    rng = np.random.default_rng([most, behind])
    costs = RoundCosts(
        table_of(lambda r, t: 10_000.0 + 2000.0 / most * (t - r), draft_us=900.0, counts=(1, 2, 4, 8, 64)),
        max_draft_len=GAMMA,
    )
    both, traffic = SideBySide(costs), Traffic(rng, most)
    flying: list[Round] = []
    seen: dict[str, int] = {}
    for number in range(ROUNDS):
        for name in traffic.step(number):
            both.forget(name)
        requests, count = list(traffic.batch), len(traffic.batch)
        # For some time nearly nobody asks for drafts.
        idle = 0.9 if number % 200 > 150 else 0.05
        caps = np.where(rng.random(count) < idle, 0, rng.integers(1, GAMMA + 1, count))
        caps[int(rng.integers(count))] = GAMMA
        scale = 1.0 + (number // 50) % 2
        reason, allowed = both.plan(requests, caps, scale)
        drafted = (allowed > 0) & (reason in ("speculate", "probe"))
        for event, found in {
            reason: True,
            "rests": reason == "speculate" and np.count_nonzero(drafted) < np.count_nonzero(caps),
            "held back": both.core.bypassed and not both.core._bypass.active,
        }.items():
            seen[event] = seen.get(event, 0) + int(found)
        chances = traffic.chances()[:, None]
        confidence = np.clip(chances * rng.uniform(0.8, 1.2, (count, GAMMA)), 0, 1).astype(np.float32)
        lengths = np.zeros(count, np.int64)
        if drafted.any():
            budget = int(rng.integers(1, count * GAMMA + 1))
            lengths = both.verify_lens(requests, allowed, confidence, budget)
        accepted = np.minimum(lengths, rng.geometric(1.0 - 0.95 * chances[:, 0]) - 1)
        accepted[rng.random(count) < 0.02] = -1
        flying.append(Round(requests, drafted, confidence, lengths, accepted))
        while len(flying) > behind:
            both.observe(flying.pop(0))
        # Passes grow slower, drafts dearer, and back; the first rounds are not timed.
        drift = 1.0 + 0.5 * np.sin(number / 40)
        tokens = count + int(lengths.sum())
        if number >= 60:
            costs.observe_verify(count, tokens, 128, drift * 10_000 + 1000 * drift * lengths.sum(), cost_scale=scale)
        if drafted.any():
            costs.observe_draft(count, 128, 2000.0 * drift)
            costs.observe_untimed()
    assert {"speculate", "bypass", "probe"} <= seen.keys()
    # One alone rests too often to draft 64 rounds in a row.
    assert most == 1 or (seen["measure"] and seen["rests"] > 5 and seen["held back"] > 5)
    for name in traffic.batch:
        both.forget(name)
    assert len(both.core._rows) == 0
