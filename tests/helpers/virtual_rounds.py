"""A closed loop in virtual time: a controller, requests that accept drafts with known chances, and a cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trtllm_dspark.speculation import CostTable, RoundOutcome, SpeculationController
from trtllm_dspark.speculation.controller import RoundPlan
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape

GAMMA = 7
Cost = Callable[[int, int], float]
"""(requests, tokens) -> microseconds of a target pass."""


def roofline(num_requests: int, num_tokens: int) -> float:
    """Level while the weights are read, then rising with the tokens: many requests leave no room for drafts."""
    return 10_000.0 + 20.0 * num_requests + 800.0 * max(0, num_tokens - 12)


def table_of(
    cost: Cost, *, draft_us: float = 900.0, counts: Sequence[int] = (1, 2, 4, 8), lengths: Sequence[int] = range(1, 9)
) -> CostTable:
    """Return the cost table of a cost model, at one depth."""
    shapes = [VerifyShape(r, tokens, k, 128) for r in counts for k in lengths for tokens in (r * k, r - 1 + k)]
    # One row grown to a whole block before the next one.
    shapes += [VerifyShape(r, r + full * GAMMA, GAMMA + 1, 128) for r in counts for full in range(1, r + 1)]
    verify = {shape: cost(shape.num_requests, shape.num_tokens) for shape in shapes}
    return CostTable(verify, {DraftShape(r, 128): draft_us * (0.8 + 0.2 * r) for r in counts})


@dataclass
class Stream:
    """A request.

    Attributes:
        chance: conditional probability that a draft is accepted.
        claimed: what the confidence head says of it; None = the truth.
        cap: most drafts it may have verified.
    """

    name: str
    chance: float
    claimed: float | None = None
    cap: int = GAMMA


@dataclass
class VirtualLoop:
    """Run rounds and keep what they took.

    Attributes:
        controller: what decides.
        cost: what target passes really take.
        table: what drafts take.
        noise: standard deviation of the logarithm of a pass's time.
        whole: the controller is told what rounds take as a whole, as by a device.
    """

    controller: SpeculationController
    cost: Cost
    table: CostTable
    noise: float = 0.0
    whole: bool = False
    seed: int = 0
    microseconds: float = 0.0
    tokens: int = 0
    plans: list[RoundPlan] = field(default_factory=list)
    verify_lens: list[dict[str, int]] = field(default_factory=list)
    accepted: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    @property
    def reasons(self) -> list[str]:
        return [plan.reason for plan in self.plans]

    def run(self, streams: Sequence[Stream], rounds: int) -> None:
        for _ in range(rounds):
            self.round(streams)

    def round(self, streams: Sequence[Stream]) -> None:
        names = [stream.name for stream in streams]
        caps = np.array([stream.cap for stream in streams], np.int64)
        self.controller.limits()
        plan = self.controller.plan(names, caps=caps, token_budget=200, depth=128)
        outcomes = self.rng.random((len(streams), GAMMA))
        confidence, lengths = None, np.zeros(len(streams), np.int64)
        if plan.drafts:
            confidence = self.confidences(streams)[:, : self.controller.draft_len].copy()
            lengths = self.controller.verify_lens(plan, names, caps=plan.caps, confidence=confidence, depth=128)
        accepted = np.array(
            [_prefix(row[:n] < stream.chance) for row, n, stream in zip(outcomes, lengths, streams, strict=True)]
        )
        drafted = plan.caps > 0
        # A pass runs over all rows from the first to the last that drafts.
        span = np.flatnonzero(drafted)[[0, -1]] if plan.drafts else np.zeros(2, np.int64)
        draft_us = self.table.draft_time_us(int(span[1] - span[0]) + 1, depth=128) if plan.drafts else None
        verify_us = self.cost(len(streams), len(streams) + int(lengths.sum()))
        verify_us *= float(np.exp(self.noise * self.rng.normal()))
        times = (None, None, verify_us + (draft_us or 0.0)) if self.whole else (draft_us, verify_us, None)
        outcome = RoundOutcome(plan, names, 128, lengths, accepted, confidence, drafted, *times)
        self.controller.observe(outcome)
        self.microseconds += verify_us + (draft_us or 0.0)
        self.tokens += len(streams) + int(accepted.sum())
        self.plans.append(plan)
        self.verify_lens.append(dict(zip(names, lengths.tolist(), strict=True)))
        self.accepted.append(dict(zip(names, accepted.tolist(), strict=True)))

    def confidences(self, streams: Sequence[Stream]) -> np.ndarray:
        claimed = [stream.chance if stream.claimed is None else stream.claimed for stream in streams]
        spread = self.rng.uniform(0.9, 1.1, (len(streams), GAMMA))
        return np.clip(np.array(claimed)[:, None] * spread, 0.0, 1.0).astype(np.float32)

    def mean_verify_len(self, first: int, last: int) -> float:
        """Return drafts verified a request in rounds [first, last)."""
        return float(np.mean([np.mean(list(lengths.values())) for lengths in self.verify_lens[first:last]]))

    def mean_accepted(self, first: int, last: int, name: str) -> float:
        """Return drafts of one stream accepted a round in rounds [first, last)."""
        return float(np.mean([accepted[name] for accepted in self.accepted[first:last]]))

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.microseconds * 1e6


def plain_rate(cost: Cost, num_requests: int) -> float:
    """Return tokens a second of plain decoding."""
    return num_requests / cost(num_requests, num_requests) * 1e6


def _prefix(right: np.ndarray) -> int:
    return len(right) if right.all() else int(np.argmin(right))
