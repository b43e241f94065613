"""`--speculation adaptive`: verify the drafts that pay, draft while that pays (docs/adaptive.md)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.speculation.bypass import Bypass
from trtllm_dspark.speculation.controller_gain import THRESHOLDS, BlockStatistics
from trtllm_dspark.speculation.drift import RoundCosts

EVALUATE_EVERY = 4
"""Rounds between two evaluations while the batch stays the same."""
FIRST_ROUNDS = 16
"""Rounds at first that are evaluated one by one: nothing is known of the drafter yet."""
MEASURE_EVERY = 64
"""Rounds in a row with drafts before one without: what drafts cost shows against a pass that has none."""
FIRST_MEASURE = 8
"""The same for the first time, when the table was not checked yet."""
RATIO_MEMORY = 0.98
RATIO_PRIOR = 1.0
"""Drafts that the confidences count as right before outcomes say otherwise."""
MAX_RATIO = 1.5


class AdaptivePolicy:
    """Choose per request the survival a draft needs to be verified, and per round whether to draft at all.

    Every request is judged as if the whole batch were like it: of the thresholds C the one with the most tokens a
    microsecond, R (1 + rho A(C)) / (d + t(C)), where A are the survivors over its past blocks, rho outcomes over
    promises, d the draft's and t the pass's corrected time at the lengths C gives. What others sample, accept or ask
    for does not enter; only how many they are (docs/adaptive.md).

    Args:
        costs: times of the engine's passes.
        max_draft_len: gamma.
    """

    def __init__(self, costs: RoundCosts, *, max_draft_len: int) -> None:
        self.gain: float | None = None
        self.threshold: float | None = None
        self._costs = costs
        self._gamma = max_draft_len
        self._steps = np.arange(max_draft_len)
        self._drafts = np.arange(max_draft_len + 1, dtype=np.float64)
        self._bypass = Bypass()
        self._blocks = BlockStatistics(max_draft_len)
        self._promised = self._kept = 0.0
        self._thresholds: dict[Hashable, float] = {}
        self._batch: tuple[Hashable, ...] = ()
        self._age = self._round = 0
        self._measure_after = FIRST_MEASURE
        self._fresh = False
        self._default = 1.0
        self._probed_at: dict[Hashable, int] = {}
        self._num_probed = 0
        self._probing: Hashable | None = None

    @property
    def bypassed(self) -> bool:
        """Whether rounds decode plainly."""
        return self._bypass.active

    @property
    def accepted_ratio(self) -> float:
        """Drafts accepted over drafts promised, recently."""
        ratio = (self._kept + RATIO_PRIOR) / (self._promised + RATIO_PRIOR)
        return min(MAX_RATIO, ratio)

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
            self._fresh = self._bypass.active and self._any_fresh(caps)
        if self.gain is None:
            return "speculate", caps
        step = self._bypass.step(self.gain, fresh=self._fresh)
        if step == "probe":
            return step, self._only_probed(caps)
        self._probing = None
        if step == "speculate" and self._costs.rounds_unmeasured >= self._measure_after:
            self._measure_after = MEASURE_EVERY
            return "measure", caps
        return step, caps

    def thresholds(self, requests: Sequence[Hashable]) -> FloatArray:
        """Return [R] float32 survivals that drafts need to be verified; above 1 = none."""
        return np.array([self._thresholds.get(request, self._default) for request in requests], np.float32)

    def verify_lens(
        self, requests: Sequence[Hashable], *, caps: IntArray, confidence: FloatArray, budget: int, probing: bool
    ) -> IntArray:
        """Return [R] int64 drafts to verify: while the survival is at least the request's threshold."""
        wanted = self.thresholds(requests)
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
        if probing and budget >= int(np.count_nonzero(caps)):
            # A confidence nobody tests could be wrong for ever.
            lengths = np.maximum(lengths, np.minimum(caps, 1))
        return lengths

    def observe(
        self, requests: Sequence[Hashable], confidence: FloatArray, verify_len: IntArray, accepted: IntArray
    ) -> None:
        """Learn from blocks of a past round: [N, gamma] calibrated confidences, [N] drafts verified and accepted."""
        # fmax: where the drafter gave no number nothing is promised.
        survival = np.fmax(confidence, np.float32(0)).cumprod(axis=1)
        self._blocks.add(requests, survival)
        if self._bypass.active:
            self._batch = ()
        tested = self._steps < verify_len[:, None]
        self._promised = RATIO_MEMORY * self._promised + float(survival[tested].sum())
        self._kept = RATIO_MEMORY * self._kept + float(accepted.sum())

    def forget(self, request: Hashable) -> None:
        """Drop what is kept about a request that has ended."""
        self._blocks.forget(request)
        self._thresholds.pop(request, None)
        self._probed_at.pop(request, None)
        self._batch = ()

    def _evaluate(self, batch: tuple[Hashable, ...], caps: IntArray, depth: int, cost_scale: float) -> None:
        """Set thresholds and gain of the batch."""
        count = len(batch)
        drafting = [request for request, cap in zip(batch, caps.tolist(), strict=True) if cap > 0]
        curve = self._costs.verify_us(count, depth, cost_scale=cost_scale).astype(np.float64)
        draft_us = self._costs.draft_us(len(drafting), depth)
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
        lengths, survivors = self._blocks.means(drafting)
        tokens = 1.0 + self.accepted_ratio * survivors
        # One request's lengths are what the pass gets; of many alike it gets their mean, at the slope it has there.
        mean = count * (1.0 + lengths @ self._drafts)
        together = (np.interp(mean, np.arange(len(curve)), curve) - plain_us) / count
        more_us = (lengths @ added) / count + together * (1.0 - 1.0 / count)
        rates = tokens / (draft_us / len(drafting) + plain_us / count + more_us)
        # Of equal rates the one that verifies least.
        best = rates.shape[1] - 1 - np.argmax(rates[:, ::-1], axis=1)
        rows = np.arange(len(drafting))
        gained = float((tokens[rows, best] - 1.0).sum())
        spent = draft_us + float(more_us[rows, best].sum())
        self.gain = (count + gained) / (plain_us + spent) * plain_us / count - 1.0
        chosen = THRESHOLDS[best].astype(np.float64)
        self._thresholds.update(zip(drafting, chosen.tolist(), strict=True))
        self.threshold = float(np.minimum(chosen, 1.0).mean())

    def _any_fresh(self, caps: IntArray) -> bool:
        """Whether a request that could draft was never seen to."""
        pairs = zip(self._batch, caps.tolist(), strict=True)
        return any([cap > 0 and self._blocks.blocks(request) == 0 for request, cap in pairs])

    def _only_probed(self, caps: IntArray) -> IntArray:
        """Return caps that let one request draft, the same one during a probe: the unknown first, then the longest ago.

        One request costs less than all, and every request gets its turn.
        """
        rows = [row for row, cap in enumerate(caps.tolist()) if cap > 0]
        row = next((row for row in rows if self._batch[row] == self._probing), None)
        if row is None:
            row = min(rows, key=lambda row: self._last_probe(self._batch[row]))
            self._probing = self._batch[row]
            self._num_probed += 1
            self._probed_at[self._probing] = self._num_probed
        one = np.zeros_like(caps)
        one[row] = caps[row]
        return one

    def _last_probe(self, request: Hashable) -> tuple[bool, int]:
        return self._blocks.blocks(request) > 0, self._probed_at.get(request, 0)
