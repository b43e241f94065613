"""The controller in `adaptive` mode as the scheduler of a toy loop, with everything it may react to in motion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from helpers.toy_loop import Accept
from trtllm_dspark import _core
from trtllm_dspark.speculation import CostTable, LoadLimits, RoundOutcome, SpeculationConfig, SpeculationController
from trtllm_dspark.speculation.controller import RoundPlan
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape

LOADS = (
    LoadLimits(),
    LoadLimits(cost_scale=2.5),
    LoadLimits(verify_budget=3),
    LoadLimits(verify_budget=0),
    LoadLimits(cost_scale=1.5, verify_budget=6),
)


class MovingLoad:
    """Other limits every round."""

    def __init__(self) -> None:
        self.round = 0

    def limits(self) -> LoadLimits:
        self.round += 1
        return LOADS[self.round % len(LOADS)]


class MovingCalibration:
    """Parameters that follow what past rounds accepted, in large steps: a calibration at its most nervous."""

    def __init__(self) -> None:
        self.temperature, self.bias = 1.0, 0.0

    def arrays(self, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        steps = np.arange(num_positions, dtype=np.float32)
        return np.float32(self.temperature) + 0.1 * steps, np.float32(self.bias) - 0.2 * steps

    def observe(self, confidence: np.ndarray, verify_len: np.ndarray, accepted: np.ndarray) -> None:
        verified = max(1, int(verify_len.sum()))
        self.temperature = 0.5 + 1.5 * float(accepted.sum()) / verified
        self.bias = float(confidence.mean()) - 0.5 + 0.3 * (int(accepted.sum()) % 3 - 1)


def per_token_us(num_requests: int) -> float:
    """Return what a draft costs: such that some pay and others do not, whatever the batch."""
    return 3.0 / num_requests


def toy_table(num_requests: int, gamma: int) -> CostTable:
    """Return times of up to `num_requests` requests."""
    per_token = per_token_us(num_requests)
    verify = {
        VerifyShape(r, r * k, k, 0): 20.0 + r + per_token * (r * k - r)
        for r in range(1, num_requests + 1)
        for k in range(1, gamma + 2)
    }
    return CostTable(verify, {DraftShape(r, 0): 1.0 + 0.5 * r for r in range(1, num_requests + 1)})


def adaptive_controller(num_requests: int, gamma: int) -> SpeculationController:
    return SpeculationController(
        SpeculationConfig("adaptive"),
        max_draft_len=gamma,
        cost_table=toy_table(num_requests, gamma),
        calibrator=MovingCalibration(),
        load=MovingLoad(),
    )


@dataclass
class Group:
    """One batch: its controller and what it is about to be told."""

    controller: SpeculationController
    names: list[int]
    plan: RoundPlan | None = None
    confidence: np.ndarray | None = None
    lengths: np.ndarray | None = None
    rounds: int = 0

    def schedule(self, raw: np.ndarray, token_budget: int = 1 << 20) -> np.ndarray:
        count, gamma = raw.shape
        self.controller.limits()
        caps = np.full(count, gamma, np.int64)
        self.plan = self.controller.plan(self.names, caps=caps, token_budget=token_budget, depth=0)
        if not self.plan.drafts:
            self.confidence, self.lengths = None, np.zeros(count, np.int64)
            return self.lengths
        assert self.plan.temperature is not None
        assert self.plan.bias is not None
        clipped = np.clip(raw.astype(np.float64), 1e-6, 1 - 1e-6)
        logit = np.log(clipped / (1 - clipped)) / self.plan.temperature + self.plan.bias
        self.confidence = (1 / (1 + np.exp(-logit))).astype(np.float32)
        self.lengths = self.controller.verify_lens(
            self.plan, self.names, caps=self.plan.caps, confidence=self.confidence, depth=0
        )
        return self.lengths

    def observe(self, accepted: np.ndarray) -> None:
        """Tell the controller what became of the round; its times are made up and never steady."""
        assert self.plan is not None
        assert self.lengths is not None
        self.rounds += 1
        jitter = 1.0 + 0.5 * (self.rounds % 3) + 0.2 * (int(accepted.sum()) % 2)
        outcome = RoundOutcome(
            plan=self.plan,
            requests=self.names,
            depth=0,
            verify_len=self.lengths,
            accepted=accepted,
            confidence=self.confidence,
            drafted=self.plan.caps > 0,
            draft_us=3.0 * jitter if self.plan.drafts else None,
            verify_us=jitter * (20.0 + per_token_us(len(self.names)) * float(self.lengths.sum())),
        )
        self.controller.observe(outcome)


@dataclass
class AdaptiveScheduler:
    """Verify lengths of groups of requests, each group a batch with a controller of its own."""

    group: int
    make: Callable[[], SpeculationController]
    groups: list[Group] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    def __call__(self, confidence: np.ndarray) -> np.ndarray:
        if not self.groups:
            for start in range(0, len(confidence), self.group):
                self.groups.append(Group(self.make(), list(range(start, min(start + self.group, len(confidence))))))
        lengths = np.concatenate([group.schedule(confidence[group.names]) for group in self.groups])
        self.reasons |= {group.plan.reason for group in self.groups if group.plan is not None}
        self.verified.append(int(lengths.sum()))
        return lengths

    def accept_with(self, accept: Accept) -> Accept:
        """Return `accept`, which then also tells every group what was accepted."""

        def told(
            logits: np.ndarray, lengths: np.ndarray, positions: np.ndarray, sampling: _core.Sampling, draft: _core.Draft
        ) -> tuple[np.ndarray, np.ndarray]:
            tokens, emitted_len = accept(logits, lengths, positions, sampling, draft)
            for group in self.groups:
                group.observe(emitted_len[group.names] - 1)
            return tokens, emitted_len

        return told
