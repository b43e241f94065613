"""A round's plan for an engine that chooses verify lengths on its device, from rounds that were collected.

The host is a round behind there: what it knows when it submits round n are rounds up to n - 2. That suffices, because
no decision of the host may look at its round's confidences anyway (docs/losslessness.md); what they decide, causally
and request by request, is decided beside them on the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.engine.rounds import DeviceSchedule
from trtllm_dspark.speculation.controller import RoundPlan, SpeculationController


class DeviceScheduler:
    """Turn a controller's plans into what a device decides by.

    Args:
        controller: decides which rounds draft.
        max_requests: rows of a round at most, padding included.
    """

    def __init__(self, controller: SpeculationController, *, max_requests: int) -> None:
        self._controller = controller
        self._max_requests = max_requests
        self._latest: dict[Hashable, FloatArray] = {}

    def schedule(self, plan: RoundPlan, requests: Sequence[Hashable], *, depth: int) -> DeviceSchedule | None:
        """Return what decides on the device, or None for a round without drafts.

        Args:
            plan: of the round.
            requests: its R decoding requests.
            depth: tokens cached before each row, on average.
        """
        if not plan.drafts:
            return None
        config, table, count = self._controller.config, self._controller.cost_table, len(requests)
        mode, threshold, budget = config.mode, np.full(count, config.threshold, np.float32), 0
        step_time = None
        fixed_time = 0.0
        if config.mode == "adaptive":
            mode, threshold = "threshold", self._thresholds(plan, requests)
        elif table is not None and config.needs_cost_table:
            most = self._max_requests * (1 + self._controller.draft_len)
            step_time = table.step_time_us(count, most, depth=depth)
            fixed_time = table.draft_time_us(count, depth=depth)
        if mode == "stale_topk":
            budget = self._budget(plan, requests, step_time, fixed_time)
        if mode == "off" or mode == "adaptive":
            raise AssertionError("such a plan drafts nothing")
        return DeviceSchedule(
            mode=mode,
            draft_len=self._controller.draft_len,
            threshold=threshold,
            budget=budget,
            token_budget=plan.verify_budget,
            step_time_us=step_time,
            fixed_time_us=fixed_time,
            load_scale=plan.cost_scale,
            temperature=plan.temperature,
            bias=plan.bias,
        )

    def observe(self, requests: Sequence[Hashable], confidence: FloatArray, drafted: IntArray) -> None:
        """Keep the confidences of a collected round.

        Args:
            requests: its R decoding requests.
            confidence: [R, gamma] calibrated.
            drafted: rows that have any.
        """
        self._latest = {requests[row]: confidence[row] for row in drafted.tolist()}

    def forget(self, request: Hashable) -> None:
        """Drop what is kept about a request that has ended."""
        self._latest.pop(request, None)

    def _thresholds(self, plan: RoundPlan, requests: Sequence[Hashable]) -> FloatArray:
        if plan.reason == "probe":
            # Only one request drafts in a probe; a confidence nobody tests could be wrong for ever.
            return np.zeros(len(requests), np.float32)
        return self._controller.thresholds(requests)

    def _budget(
        self, plan: RoundPlan, requests: Sequence[Hashable], step_time: FloatArray | None, fixed_time: float
    ) -> int:
        if self._controller.config.budget is not None:
            return self._controller.config.budget
        # A request that was not there two rounds ago counts as certain: its first rounds are verified in full.
        gamma = self._controller.draft_len
        sure = np.ones(gamma, np.float32)
        stale = np.stack([self._latest.get(key, sure)[:gamma] for key in requests])
        budget, _ = _core.verify_budget(
            stale,
            step_time_us=step_time,
            caps=plan.caps,
            token_budget=plan.verify_budget,
            load_scale=plan.cost_scale,
            fixed_time_us=fixed_time,
        )
        return budget
