"""The serving code's `SpeculationController`, fed with blocks that were drawn beforehand."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core
from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.simulate.pool import BlockPool, calibrated
from trtllm_dspark.speculation.controller import RoundOutcome, RoundPlan, SpeculationController


@dataclass(slots=True)
class Decision:
    """What one round does, and later what became of it.

    Attributes:
        plan: of the controller.
        requests: keys of the decoding requests.
        depth: tokens cached before each row, on average.
        verify_len: [R] drafts verified.
        confidence: [R, draft_len] calibrated confidences, or None.
        num_drafted: requests that drafted.
        num_rows: rows of the draft: one span from the first of them to the last, whoever lies between.
    """

    plan: RoundPlan
    requests: Sequence[Hashable]
    depth: int
    verify_len: IntArray
    confidence: FloatArray | None
    num_drafted: int
    num_rows: int = 0


class Speculator:
    """Drive a controller through simulated rounds as a session does.

    Args:
        controller: the serving code.
        pool: blocks of every domain.
        full_below: requests up to which whole blocks are verified.
    """

    def __init__(self, controller: SpeculationController, pool: BlockPool, *, full_below: int = 0) -> None:
        self.controller = controller
        self._full_below = full_below
        self.draft_len = controller.draft_len
        self._everybody = np.ones(0, np.bool_)
        self._logits = np.ascontiguousarray(pool.logits[:, : self.draft_len])
        # Confidences of every block under the calibration of the last round; it changes seldom or never.
        self._temperature: FloatArray | None = None
        self._bias: FloatArray | None = None
        self._confidence = calibrated(self._logits, None, None) if controller.needs_confidence else None

    def decide(
        self, requests: Sequence[Hashable], rows: _core.SimulatedRows, *, caps: IntArray, token_budget: int, depth: int
    ) -> Decision:
        """Plan a round and, where it drafts, choose what is verified.

        Args:
            requests: keys of the R decoding requests.
            rows: theirs.
            caps: [R] drafts of each that may be verified.
            token_budget: drafts that fit into the round.
            depth: tokens cached before each row, on average.
        """
        controller = self.controller
        plan = controller.plan(requests, caps=caps, token_budget=token_budget, depth=depth)
        caps, num_drafted = plan.caps, plan.num_drafting
        if not num_drafted:
            # All 0, as what is verified.
            return Decision(plan, requests, depth, caps, None, 0)
        confidence = None
        if self._confidence is not None:
            if plan.temperature is not self._temperature or plan.bias is not self._bias:
                self._temperature, self._bias = plan.temperature, plan.bias
                self._confidence = calibrated(self._logits, plan.temperature, plan.bias)
            confidence = rows.confidence(self._confidence)
        num_rows = num_drafted
        if num_drafted < len(requests):
            drafting = caps.nonzero()[0]
            num_rows = int(drafting[-1] - drafting[0]) + 1
        if len(requests) <= self._full_below and plan.reason == "speculate" and caps.sum() <= plan.verify_budget:
            return Decision(plan, requests, depth, caps, confidence, num_drafted, num_rows)
        verify_len = controller.verify_lens(plan, requests, caps=caps, confidence=confidence, depth=depth)
        return Decision(plan, requests, depth, verify_len, confidence, num_drafted, num_rows)

    def learn(self, decision: Decision, accepted: IntArray, draft_us: float | None, verify_us: float | None) -> None:
        """Tell the controller what became of a round; times it could not compare are None."""
        self.controller.observe(
            RoundOutcome(
                plan=decision.plan,
                requests=decision.requests,
                depth=decision.depth,
                verify_len=decision.verify_len,
                accepted=accepted,
                confidence=decision.confidence,
                drafted=self._drafted(decision),
                draft_us=draft_us,
                verify_us=verify_us,
            )
        )

    def _drafted(self, decision: Decision) -> NDArray[np.bool_]:
        count = len(decision.requests)
        if decision.num_drafted < count:
            return decision.plan.caps > 0
        if len(self._everybody) < count:
            self._everybody = np.ones(2 * count, np.bool_)
        return self._everybody[:count]
