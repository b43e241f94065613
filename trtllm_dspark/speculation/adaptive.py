"""`--speculation adaptive`: verify the drafts that pay, draft while that pays (docs/adaptive.md)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.speculation.bypass import LEAVE_GAIN, Bypass
from trtllm_dspark.speculation.controller_gain import THRESHOLDS, BlockStatistics, Reals
from trtllm_dspark.speculation.drift import RoundCosts

EVALUATE_EVERY = 4
"""Rounds between two evaluations while the batch stays the same."""
FIRST_ROUNDS = 16
"""Rounds at first that are evaluated one by one: nothing is known of the drafter yet."""
MEASURE_EVERY = 64
"""Rounds in a row with drafts before one without: what drafts cost shows against a pass that has none."""
FIRST_MEASURE = 8
"""The same for the first time, when the table was not checked yet."""


class AdaptivePolicy:
    """Choose per request the survival a draft needs to be verified, and per round whether to draft at all.

    Every request is judged as if the whole batch were like it: of the thresholds C the one with the most tokens a
    microsecond, R (1 + rho A(C)) / (d(R) + t(C)), where A are the survivors over its past blocks, rho its outcomes over
    its promises, d the draft's and t the pass's corrected time at the lengths C gives. Where even that is slower than
    plain decoding the request alone decodes plainly. What others sample, accept or ask for does not enter, only how
    many they are - with two exceptions: a new request is judged by the mean of all until it has blocks of its own, and
    those that rest are probed one after the other. In turn a request pays d(R) / R for its share of a draft whoever
    drafts with it; where few do, the others wait for the rest of that pass (docs/adaptive.md).

    Args:
        costs: times of the engine's passes.
        max_draft_len: gamma.
    """

    def __init__(self, costs: RoundCosts, *, max_draft_len: int) -> None:
        self.gain: float | None = None
        self.threshold: float | None = None
        self._costs = costs
        self._gamma = max_draft_len
        self._drafts = np.arange(max_draft_len + 1, dtype=np.float64)
        self._bypass = Bypass()
        self._blocks = BlockStatistics(max_draft_len)
        # By request: its threshold, and the survivors and drafts to verify that are expected of its next block.
        self._expected: dict[Hashable, tuple[float, float, float]] = {}
        self._gains: list[float] = []
        # By row of the batch: tokens that drafts are expected to add, and microseconds that verifying them takes.
        self._worth: tuple[Reals, Reals] = np.zeros(0), np.zeros(0)
        self._held_back = False
        self._batch: tuple[Hashable, ...] = ()
        self._age = self._round = 0
        self._measure_after = FIRST_MEASURE
        self._unmeasured = 0
        self._default = 1.0
        self._probed_at: dict[Hashable, int] = {}
        self._num_probed = 0
        self._probing: Hashable | None = None

    @property
    def bypassed(self) -> bool:
        """Whether rounds decode plainly."""
        return self._bypass.active or self._held_back

    @property
    def accepted_ratio(self) -> float:
        """Drafts accepted over drafts promised by all requests, recently."""
        return self._blocks.accepted_ratio

    def plan(
        self, requests: Sequence[Hashable], caps: IntArray, depth: int, cost_scale: float
    ) -> tuple[Literal["bypass", "measure", "probe", "speculate"], IntArray]:
        """Return what a round does and [R] int64 drafts of each request that may be verified."""
        batch = tuple(requests)
        self._age += 1
        self._round += 1
        if batch != self._batch or self._age >= EVALUATE_EVERY or self._round < FIRST_ROUNDS:
            self._batch, self._age = batch, 0
            self._evaluate(batch, caps, depth, cost_scale)
        if not self._gains:
            self._bypass.meet(batch)
            return "speculate", caps
        able = np.flatnonzero(caps).tolist()
        requests_able = [batch[row] for row in able]
        due = self._bypass.step(
            requests_able,
            [self._gains[row] for row in able],
            [self._blocks.blocks(request) for request in requests_able],
        )
        resting = [row for row in able if self._bypass.rests(batch[row])]
        probed = self._probed(resting) if due else None
        if probed is None:
            self._probing = None
        drafting = [row for row in able if not self._bypass.rests(batch[row])]
        if not drafting or not self._pays(drafting, depth):
            if probed is None:
                return "bypass", caps
            one = np.zeros_like(caps)
            one[probed] = caps[probed]
            return "probe", one
        if self._wants_measure():
            return "measure", caps
        caps = caps.copy()
        caps[resting] = 0
        if probed is not None:
            caps[probed] = 1
        return "speculate", caps

    def thresholds(self, requests: Sequence[Hashable]) -> FloatArray:
        """Return [R] float32 survivals that drafts need to be verified; above 1 = none, 0 = it is probed."""
        own = self._own_thresholds(requests)
        own[[request == self._probing for request in requests]] = 0.0
        return own

    def verify_lens(
        self, requests: Sequence[Hashable], *, caps: IntArray, confidence: FloatArray, budget: int, probing: bool
    ) -> IntArray:
        """Return [R] int64 drafts to verify: while the survival is at least the request's threshold."""
        wanted = self._own_thresholds(requests)
        probed = np.array([request == self._probing for request in requests]) & (caps > 0)
        probing = probing or bool(probed.any())
        # The core takes one threshold: survivals are scaled so that each request's own becomes the least of them.
        least = float(wanted.min())
        if least > 1 and not probing:
            return np.zeros(len(requests), np.int64)
        scaled = confidence.copy()
        scaled[:, 0] *= np.float32(least) / wanted
        schedule = _core.schedule_prefixes(
            "threshold",
            num_requests=len(requests),
            max_draft_len=self._gamma,
            confidence=scaled,
            caps=caps,
            threshold=min(1.0, least),
            token_budget=budget,
        )
        lengths: IntArray = schedule.verify_len
        # A confidence nobody tests could be wrong for ever.
        tested = np.maximum(lengths, probed)
        if tested.sum() <= budget:
            lengths = tested
        return lengths

    def observe(
        self, requests: Sequence[Hashable], confidence: FloatArray, verify_len: IntArray, accepted: IntArray
    ) -> None:
        """Learn from blocks of a past round: [N, gamma] calibrated confidences, [N] drafts verified and accepted."""
        # fmax: where the drafter gave no number nothing is promised.
        survival = np.fmax(confidence, np.float32(0)).cumprod(axis=1)
        expected = [self._expected.get(request) for request in requests]
        rows = [row for row, entry in enumerate(expected) if entry is not None]
        if rows:
            table = np.array([entry for entry in expected if entry is not None])
            self._blocks.look_back([requests[row] for row in rows], survival[rows], table)
        self._blocks.add(requests, survival, verify_len, accepted)
        if self.bypassed or self._probing is not None:
            self._batch = ()

    def forget(self, request: Hashable) -> None:
        """Drop what is kept about a request that has ended."""
        self._blocks.forget(request)
        self._expected.pop(request, None)
        self._probed_at.pop(request, None)
        self._bypass.forget(request)
        self._batch = ()

    def _evaluate(self, batch: tuple[Hashable, ...], caps: IntArray, depth: int, cost_scale: float) -> None:
        """Set thresholds and gain of the batch."""
        count = len(batch)
        curve = self._costs.verify_us(count, depth, cost_scale=cost_scale).astype(np.float64)
        # By the number of requests, not by who drafts: nobody pays for what others do not use.
        draft_us = self._costs.draft_us(count, depth)
        plain_us = float(curve[count])
        # What k more tokens of every request add, as one request's part.
        added = (curve[count::count] - plain_us) / count
        if self._blocks.empty:
            # Nothing is known: ask that the first draft of every request pays for itself.
            # Where a staircase gives it away, ask the least there is.
            least = float(added[1]) * count / (draft_us + plain_us)
            self._default = min(1.0, max(float(THRESHOLDS[0]), least))
            self.threshold = self._default
            return
        lengths, survivors = self._blocks.means(batch)
        tokens = 1.0 + self._blocks.ratios(batch)[:, None] * survivors
        # One request's lengths are what the pass gets; of many alike it gets their mean, at the slope it has there.
        mean = count * (1.0 + lengths @ self._drafts)
        together = (np.interp(mean, np.arange(len(curve)), curve) - plain_us) / count
        more_us = (lengths @ added) / count + together * (1.0 - 1.0 / count)
        least_us = (draft_us + plain_us) / count
        rates = tokens / (least_us + more_us)
        # Of equal rates the one that verifies least.
        best = rates.shape[1] - 1 - np.argmax(rates[:, ::-1], axis=1)
        rows = np.arange(count)
        chosen = THRESHOLDS[best].astype(np.float64)
        verified = (lengths @ self._drafts)[rows, best]
        expected = zip(chosen.tolist(), survivors[rows, best].tolist(), verified.tolist(), strict=True)
        self._expected.update(zip(batch, expected, strict=True))
        left = self._blocks.hindsight(batch)
        tokens_left = 1.0 + left[:, 0] * (tokens[rows, best] - 1.0)
        gains = tokens_left / (least_us + left[:, 1] * more_us[rows, best]) * plain_us / count - 1.0
        self._gains = gains.tolist()
        self._worth = tokens_left - 1.0, left[:, 1] * more_us[rows, best]
        able = caps > 0
        self.gain, self.threshold = float(gains[able].mean()), float(np.minimum(chosen[able], 1.0).mean())

    def _pays(self, drafting: list[int], depth: int) -> bool:
        """Return whether what some of the rows gain pays for the draft pass that all wait for.

        Each was judged as if all were like it, a share of d(R); the pass runs from the first to the last that drafts.
        """
        count = len(self._batch)
        if len(drafting) == count:
            self._held_back = False
            return True
        extra_tokens, more_us = (float(values[drafting].sum()) for values in self._worth)
        draft_us = self._costs.draft_us(drafting[-1] - drafting[0] + 1, depth)
        # More tokens than plain decoding would give in the time they cost.
        share = extra_tokens * self._costs.plain_us(count, depth) / (count * (draft_us + more_us))
        self._held_back = share < (1.0 + LEAVE_GAIN if self._held_back else 1.0)
        return not self._held_back

    def _wants_measure(self) -> bool:
        """Return whether a plain round is due; one that could not be timed is not followed by another at once."""
        unmeasured = self._costs.rounds_unmeasured
        if unmeasured < self._unmeasured:
            self._measure_after = MEASURE_EVERY
        self._unmeasured = unmeasured
        if unmeasured < self._measure_after:
            return False
        self._measure_after = unmeasured + MEASURE_EVERY
        return True

    def _own_thresholds(self, requests: Sequence[Hashable]) -> FloatArray:
        unknown = (self._default, 0.0, 0.0)
        return np.array([self._expected.get(request, unknown)[0] for request in requests], np.float32)

    def _probed(self, rows: list[int]) -> int:
        """Return the row that is probed, the same one during a probe: the unknown first, then the longest ago.

        One request costs less than all, and every request gets its turn.
        """
        row = next((row for row in rows if self._batch[row] == self._probing), None)
        if row is None:
            row = min(rows, key=lambda row: self._last_probe(self._batch[row]))
            self._probing = self._batch[row]
            self._num_probed += 1
            self._probed_at[self._probing] = self._num_probed
        return row

    def _last_probe(self, request: Hashable) -> tuple[bool, int]:
        return self._blocks.blocks(request) > 0, self._probed_at.get(request, 0)
