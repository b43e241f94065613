"""What mode `adaptive` decides, by array operations and plain counters: the oracle of the policy and of its core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from helpers.numpy_statistics import NumpyBlockStatistics, PlainStandings, Reals
from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.speculation import adaptive, bypass
from trtllm_dspark.speculation.controller_gain import THRESHOLDS
from trtllm_dspark.speculation.drift import RoundCosts

NOBODY = ""


class NumpyAdaptivePolicy:
    """As `AdaptivePolicy`. Every request has a row for ever; a round's curve is computed whole."""

    def __init__(self, costs: RoundCosts, *, max_draft_len: int) -> None:
        self.gain: float | None = None
        self.threshold: float | None = None
        self.costs = costs
        self.blocks, self.standings = NumpyBlockStatistics(max_draft_len), PlainStandings()
        self.rows: dict[str, int] = {}
        self.num_rows = 0
        # Of the batch that was evaluated last.
        self.batch: list[str] = []
        self.worth: Reals | None = None
        self.round = self.age = 0
        self.default = 1.0
        # The probes of those that rest.
        self.resting_all = False
        self.idle = self.left = 0
        self.period = bypass.PROBE_PERIOD
        self.probe_cost = 0.0
        self.probing = NOBODY
        self.probed_at: dict[str, int] = {}
        # Rounds that too few would draft in.
        self.held_back = False
        self.held_rounds = 0
        # Plain rounds that are timed.
        self.measure_after, self.unmeasured = adaptive.FIRST_MEASURE, 0

    @property
    def bypassed(self) -> bool:
        return self.resting_all or self.held_back

    @property
    def accepted_ratio(self) -> float:
        return self.blocks.accepted_ratio

    def plan(self, requests: Sequence[str], caps: IntArray, depth: int, cost_scale: float) -> tuple[str, IntArray]:
        rows = self.take(requests)
        self.age += 1
        self.round += 1
        if self.batch != list(requests) or self.age >= adaptive.EVALUATE_EVERY or self.round < adaptive.FIRST_ROUNDS:
            self.batch, self.age = list(requests), 0
            self.evaluate(rows, caps, depth, cost_scale)
        if self.worth is None:
            self.standings.meet(rows)
            return "speculate", caps
        resting, due = self.judge(rows, caps, self.worth[0])
        self.probing = self.choose_probed(resting, rows) if due else NOBODY
        probed = self.is_probed(requests)
        if self.resting_all or not self.pays(self.worth, caps, resting, depth):
            return ("probe", np.where(probed, caps, 0)) if due else ("bypass", caps)
        if self.wants_measure():
            return "measure", caps
        allowed = caps.copy()
        allowed[resting] = 0
        allowed[probed] = 1
        return "speculate", allowed

    def thresholds(self, requests: Sequence[str]) -> FloatArray:
        own = self.blocks.thresholds(self.known(requests), self.default)
        return np.where(self.is_probed(requests), np.float32(0), own)

    def verify_lens(self, requests: Sequence[str], *, caps: IntArray, confidence: FloatArray, budget: int) -> IntArray:
        probed = self.rows.get(self.probing, -1)
        return self.blocks.verify_lens(
            self.known(requests), caps, confidence, budget=budget, unknown=self.default, probed=probed
        )

    def observe(
        self,
        requests: Sequence[str],
        drafted: np.ndarray,
        confidence: FloatArray,
        verify_len: IntArray,
        accepted: IntArray,
    ) -> None:
        rows = self.known(requests)
        kept = drafted & (accepted >= 0) & (rows >= 0)
        if not kept.any():
            return
        self.blocks.add(rows[kept], confidence[kept], verify_len[kept], accepted[kept])
        if self.bypassed or self.probing != NOBODY:
            self.batch = []

    def forget(self, request: str) -> None:
        self.rows.pop(request, None)
        self.probed_at.pop(request, None)
        self.batch = []

    def take(self, requests: Sequence[str]) -> IntArray:
        for name in requests:
            if name not in self.rows:
                self.rows[name] = self.num_rows
                self.blocks.reset(self.num_rows)
                self.standings.reset(self.num_rows)
                self.num_rows += 1
        return self.known(requests)

    def known(self, requests: Sequence[str]) -> IntArray:
        return np.array([self.rows.get(name, -1) for name in requests], np.int64)

    def is_probed(self, requests: Sequence[str]) -> np.ndarray:
        return np.array([name == self.probing for name in requests])

    def evaluate(self, rows: IntArray, caps: IntArray, depth: int, cost_scale: float) -> None:
        count = len(rows)
        curve = self.costs.verify_us(count, depth, cost_scale=cost_scale)
        draft_us = self.costs.draft_us(count, depth)
        if self.blocks.empty:
            plain_us, one_more_us = float(curve[count]), float(curve[2 * count])
            least = (one_more_us - plain_us) / (draft_us + plain_us)
            self.threshold = self.default = min(1.0, max(float(THRESHOLDS[0]), least))
        else:
            self.worth, self.gain, self.threshold = self.blocks.evaluate(rows, caps, curve, draft_us)
            plain_us, one_more_us = curve[count : count + 2].astype(np.float64)
            self.probe_cost = (self.costs.draft_us(1, depth) + one_more_us - plain_us) / plain_us

    def judge(self, rows: IntArray, caps: IntArray, gains: Reals) -> tuple[IntArray, bool]:
        """Return places of those that rest, and whether one of them is probed."""
        resting, num_judged, entered, fresh = self.standings.judge(rows, caps, gains, self.blocks.blocks(rows))
        self.resting_all = len(resting) == num_judged
        if entered or not len(resting):
            self.period = bypass.PROBE_PERIOD
        if not len(resting):
            self.idle = self.left = 0
            return resting, False
        if self.left:
            self.left -= 1
            return resting, True
        self.idle += 1
        due = self.idle >= (min(bypass.FRESH_PERIOD, self.period) if fresh else self.period)
        if self.resting_all:
            due = due and self.probe_cost * bypass.PROBE_ROUNDS <= bypass.PROBE_SHARE * self.idle
        if due:
            self.idle, self.left = 0, bypass.PROBE_ROUNDS - 1
            self.period = min(2 * self.period, bypass.MAX_PROBE_PERIOD)
        return resting, due

    def choose_probed(self, resting: IntArray, rows: IntArray) -> str:
        known = {self.batch[place]: self.blocks.weight[rows[place]] > 0 for place in resting}
        if self.probing in known:
            return self.probing
        chosen = min(known, key=lambda name: (known[name], self.probed_at.get(name, 0)))
        self.probed_at[chosen] = self.round
        return chosen

    def pays(self, worth: Reals, caps: IntArray, resting: IntArray, depth: int) -> bool:
        count = len(caps)
        places = np.setdiff1d(np.flatnonzero(caps), resting)
        if len(places) == count:
            self.held_back = False
            return True
        _, extra_tokens, more_us = worth[:, places].sum(axis=1)
        draft_us = self.costs.draft_us(int(places[-1] - places[0]) + 1, depth)
        share = extra_tokens * self.costs.plain_us(count, depth) / (count * (draft_us + more_us))
        self.held_back = share < (1.0 + bypass.LEAVE_GAIN if self.held_back else 1.0)
        if not self.held_back:
            self.held_rounds = 0
            return True
        self.held_rounds = (self.held_rounds + 1) % (bypass.PROBE_PERIOD + bypass.PROBE_ROUNDS)
        return self.held_rounds >= bypass.PROBE_PERIOD

    def wants_measure(self) -> bool:
        unmeasured = self.costs.rounds_unmeasured
        if unmeasured < self.unmeasured:
            self.measure_after = adaptive.MEASURE_EVERY
        self.unmeasured = unmeasured
        if unmeasured < self.measure_after:
            return False
        self.measure_after = unmeasured + adaptive.MEASURE_EVERY
        return True
