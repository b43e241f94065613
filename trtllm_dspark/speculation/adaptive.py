"""`--speculation adaptive`: verify the drafts that pay, draft while that pays (docs/adaptive.md)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core
from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.speculation.bypass import LEAVE_GAIN, PROBE_PERIOD, PROBE_ROUNDS, Bypass
from trtllm_dspark.speculation.controller_gain import THRESHOLDS, block_statistics
from trtllm_dspark.speculation.drift import RoundCosts
from trtllm_dspark.speculation.request_rows import RequestRows

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
    those that rest are probed one after the other. A request is judged by a share d(R) / R of a draft, whoever drafts
    with it; where only some do, what they gain must pay for the whole pass, or the round decodes plainly
    (docs/adaptive.md).

    Args:
        costs: times of the engine's passes.
        max_draft_len: gamma.
    """

    def __init__(self, costs: RoundCosts, *, max_draft_len: int) -> None:
        self.gain: float | None = None
        self.threshold: float | None = None
        self._costs = costs
        self._bypass = Bypass()
        self._blocks = block_statistics(max_draft_len)
        self._rows = RequestRows(self._blocks, self._bypass)
        self._held_back = False
        self._held_rounds = 0
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
        rows = self._rows.take(requests)
        batch = self._rows.batch
        self._age += 1
        self._round += 1
        if batch != self._batch or self._age >= EVALUATE_EVERY or self._round < FIRST_ROUNDS:
            self._batch, self._age = batch, 0
            self._evaluate(rows, caps, depth, cost_scale)
        if self.gain is None:
            self._bypass.meet(rows)
            return "speculate", caps
        verdict, due = self._bypass.step(rows, caps, self._blocks)
        probed = self._probed(rows, caps, verdict) if due else None
        if probed is None:
            self._probing = None
        if self._bypass.active or not self._pays(verdict, len(rows), depth):
            if probed is None:
                return "bypass", caps
            one = np.zeros_like(caps)
            one[probed] = caps[probed]
            return "probe", one
        if self._wants_measure():
            return "measure", caps
        if verdict.num_resting:
            caps = verdict.caps
            if probed is not None:
                caps[probed] = 1
        return "speculate", caps

    def thresholds(self, requests: Sequence[Hashable]) -> FloatArray:
        """Return [R] float32 survivals that drafts need to be verified; above 1 = none, 0 = it is probed."""
        rows = self._rows.of(requests)
        own = self._blocks.thresholds(rows, self._default)
        probed = self._probed_row()
        if probed >= 0:
            own[rows == probed] = 0.0
        return own

    def verify_lens(
        self, requests: Sequence[Hashable], *, caps: IntArray, confidence: FloatArray, budget: int
    ) -> IntArray:
        """Return [R] int64 drafts to verify: while the survival is at least the request's threshold.

        Of one that is probed at least one, or a confidence that nobody tests could be wrong for ever.
        """
        return self._blocks.verify_lens(
            self._rows.of(requests),
            caps,
            np.ascontiguousarray(confidence, np.float32),
            budget=budget,
            unknown=self._default,
            probed=self._probed_row(),
        )

    def observe(
        self,
        requests: Sequence[Hashable],
        drafted: NDArray[np.bool_],
        confidence: FloatArray,
        verify_len: IntArray,
        accepted: IntArray,
    ) -> None:
        """Learn from blocks of a past round; who has ended since is not taken up again.

        Args:
            requests: the R of the round.
            drafted: [R] bool, those that have a block.
            confidence: [R, gamma] float32, calibrated.
            verify_len: [R] int64 drafts verified.
            accepted: [R] int64 drafts accepted, -1 for a request whose logits were refused.
        """
        learned = self._blocks.add(
            self._rows.of(requests),
            np.ascontiguousarray(confidence, np.float32),
            np.ascontiguousarray(verify_len, np.int64),
            np.ascontiguousarray(accepted, np.int64),
            np.ascontiguousarray(drafted, np.bool_),
        )
        if learned and (self.bypassed or self._probing is not None):
            self._batch = ()

    def forget(self, request: Hashable) -> None:
        """Drop what is kept about a request that has ended."""
        self._rows.release(request)
        self._probed_at.pop(request, None)
        self._batch = ()

    def _evaluate(self, rows: IntArray, caps: IntArray, depth: int, cost_scale: float) -> None:
        """Set thresholds and gain of the batch."""
        count = len(rows)
        # By the number of requests, not by who drafts: nobody pays for what others do not use.
        draft_us = self._costs.draft_us(count, depth)
        if self._blocks.empty:
            # Nothing is known: ask that the first draft of every request pays for itself.
            # Where a staircase gives it away, ask the least there is.
            curve = self._costs.verify_us(count, depth, cost_scale=cost_scale)
            plain_us, one_more_us = float(curve[count]), float(curve[2 * count])
            least = (one_more_us - plain_us) / (draft_us + plain_us)
            self._default = min(1.0, max(float(THRESHOLDS[0]), least))
            self.threshold = self._default
            return
        curve, correction = self._costs.table_us(count, depth), self._costs.correction
        self.gain, self.threshold = self._blocks.evaluate(
            rows, caps, curve, draft_us, base=correction.base, marginal=correction.marginal * cost_scale
        )
        plain_us = curve.item(count)
        token_us = correction.marginal * cost_scale * (curve.item(count + 1) - plain_us)
        self._bypass.price((self._costs.draft_us(1, depth) + token_us) / (correction.base * plain_us))

    def _pays(self, verdict: _core.RoundVerdict, count: int, depth: int) -> bool:
        """Return whether what some of `count` requests gain pays for the draft pass that all wait for.

        Each was judged as if all were like it, a share of d(R); the pass runs from the first to the last that drafts.
        """
        if verdict.num_judged - verdict.num_resting == count:
            self._held_back = False
            return True
        draft_us = self._costs.draft_us(verdict.span, depth)
        # More tokens than plain decoding would give in the time they cost.
        share = verdict.extra_tokens * self._costs.plain_us(count, depth) / (count * (draft_us + verdict.more_us))
        self._held_back = share < (1.0 + LEAVE_GAIN if self._held_back else 1.0)
        if not self._held_back:
            self._held_rounds = 0
            return True
        # While nothing is drafted nobody learns that it would pay by now.
        self._held_rounds = (self._held_rounds + 1) % (PROBE_PERIOD + PROBE_ROUNDS)
        return self._held_rounds >= PROBE_PERIOD

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

    def _probed_row(self) -> int:
        """Return the row of the request that is probed, -1 where none is."""
        return -1 if self._probing is None else self._rows.row(self._probing)

    def _probed(self, rows: IntArray, caps: IntArray, verdict: _core.RoundVerdict) -> int:
        """Return the place that is probed, the same one during a probe: the unknown first, then the longest ago.

        One request costs less than all, and every request gets its turn.
        """
        places: list[int] = np.flatnonzero(caps > verdict.caps).tolist()
        place = next((place for place in places if self._batch[place] == self._probing), None)
        if place is None:
            blocks = self._blocks.blocks(rows)
            place = min(places, key=lambda place: (blocks[place] > 0, self._probed_at.get(self._batch[place], 0)))
            self._probing = self._batch[place]
            self._num_probed += 1
            self._probed_at[self._probing] = self._num_probed
        return place
