"""Predicted times of a round, corrected by the measured ones."""

from __future__ import annotations

import logging
import statistics
from typing import NamedTuple

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import FloatArray
from trtllm_dspark.speculation.cost_table import CostTable

logger = logging.getLogger(__name__)

BASE_BOUND = 64.0
"""The base is corrected by at most this factor either way; what all three share decides nothing."""
RATIO_BOUND = 4.0
"""Marginal cost is corrected by at most this factor more, or less, than the base."""
DRAFT_BOUND = 64.0
"""The same of drafting: a table whose drafts are far too cheap would never let anybody stop."""
MIN_DRAFT_US = 1.0
"""Drafting takes this much at least, whatever a table says."""
NOISE = 0.06
"""Standard deviation of a round's time, as a share of it."""
COMMON_STEP = 0.005
"""How far all costs are expected to move together in a round; beside `NOISE`, a dozen rounds follow such a drift."""
RATIO_STEP = 0.004
"""How far marginal cost and drafting are expected to move against the base in a round."""
DOUBT = 0.5
"""How far off the base a table's marginal cost may be; what was learned of a ratio gets no more doubtful than this."""
SHAPE = 0.5
"""Weight of that by which a pass's tokens differ from those of other passes with drafts: tables err between points."""
MEMORY = 0.99
"""Weight of a round in the mean of what rounds with drafts verify after one more: it rests on about a hundred."""
FLAT = 0.02
"""A pass whose drafts add less than this share measures the base."""
SURPRISE = 3.0
"""A time counts as this many deviations off its prediction at most. A second such one in a row on the same side says
that the whole machine is faster or slower now."""
OUTLIER = 3.0
"""A round that took more than this times its prediction was interrupted; it counts as this much."""
TOLD = (3.0, 1.5, 1.5)
"""Factors by which the base, and marginal cost and drafting against it, have to move to be told: a busy machine's spell
doubles the base and decides nothing."""
FIRST_TELL = 16
"""Rounds before the first such line, and between two looks: a single round tells little."""
TELL_EVERY = 256
"""Rounds between two such lines at least."""
BESIDE_ROUNDS = 8
"""Rounds of a kind before what the host does beside its passes counts."""
BESIDE_MEMORY = 64
"""Rounds that its mean rests on."""
DEPTH_STEP = 64
"""Curves are kept for depths rounded to this: passes grow slowly with the context."""
MAX_CURVES = 512


class Correction(NamedTuple):
    """Measured over predicted time.

    Attributes:
        base: of a pass over one token a request, within [1/64, 64].
        marginal: of what more tokens add to it, within [1/4, 4] of `base`.
        draft: of drafting, within [1/64, 64] of `base`.
    """

    base: float = 1.0
    marginal: float = 1.0
    draft: float = 1.0


class RoundCosts:
    """Times of a round from a cost table that is corrected while it is used.

    A verify pass is predicted as `base * t(R, R) + marginal * (t(R, T) - t(R, R))`, a draft as `draft * d(R)`. A factor
    all three share decides nothing; what differs among them does. So a time that was not predicted is first taken to
    say that everything is slower or faster now. The ratios move as far as rounds of different kinds tell the parts
    apart, and stay as they were while none do. Three changes from rounds without drafts to others, or back, that all
    lie far off let them be learned anew.

    Where only whole rounds are timed, those without drafts measure the base, and what the others take beyond it
    corrects marginal and draft cost alike.

    What the host does in a round beside its passes is a cost of drafting where drafting rounds do more of it.

    Args:
        table: times of the engine's passes.
        max_draft_len: gamma.
    """

    def __init__(self, table: CostTable, *, max_draft_len: int) -> None:
        self.table = table
        self._width = max_draft_len + 1
        self._curves: dict[tuple[int, int], FloatArray] = {}
        self._drafts: dict[tuple[int, int], float] = {}
        self._drift = _core.CostDrift(
            noise=NOISE,
            common=COMMON_STEP,
            ratio=RATIO_STEP,
            doubt=DOUBT,
            shape=SHAPE,
            memory=MEMORY,
            flat=FLAT,
            surprise=SURPRISE,
            outlier=OUTLIER,
            base_bound=BASE_BOUND,
            marginal_bound=RATIO_BOUND,
            draft_bound=DRAFT_BOUND,
        )
        self._beside = {drafts: _Mean(BESIDE_MEMORY, OUTLIER) for drafts in (False, True)}
        self._told = Correction()
        self._untold = TELL_EVERY - FIRST_TELL

    @property
    def correction(self) -> Correction:
        """What the table is multiplied with."""
        return Correction(self._drift.base, self._drift.marginal, self._drift.draft)

    @property
    def rounds_unmeasured(self) -> int:
        """Rounds with drafts, timed or not, since the last timed pass without: they tell base from drafts."""
        return self._drift.rounds_unmeasured

    def plain_us(self, num_requests: int, depth: int) -> float:
        """Return microseconds of a pass over one token a request."""
        return self._drift.base * self.table_us(num_requests, depth).item(num_requests)

    def draft_us(self, num_requests: int, depth: int) -> float:
        """Return microseconds of drafting one block for each of `num_requests` requests, the host's work included."""
        return self._drift.draft * self.table_draft_us(num_requests, depth) + self.beside_us

    @property
    def beside_us(self) -> float:
        """Microseconds the host works more beside the passes in a round with drafts; 0 while unknown."""
        plain, drafting = self._beside[False], self._beside[True]
        if min(plain.count, drafting.count) < BESIDE_ROUNDS:
            return 0.0
        return max(0.0, drafting.value - plain.value)

    def verify_us(self, num_requests: int, depth: int, *, cost_scale: float = 1.0) -> FloatArray:
        """Return [R * (gamma + 1) + 1] microseconds of a pass over T tokens; entries below R are those of R.

        Args:
            num_requests: R.
            depth: tokens cached before each row, on average.
            cost_scale: further factor on what tokens beyond R add.
        """
        curve = self.table_us(num_requests, depth)
        first = curve[num_requests]
        factor = np.float32(self._drift.marginal * cost_scale)
        return np.asarray(np.float32(self._drift.base) * first + factor * (curve - first), np.float32)

    def table_us(self, num_requests: int, depth: int) -> FloatArray:
        """Return the same by the table alone, without corrections; not to be written to."""
        key = num_requests, (depth + DEPTH_STEP // 2) // DEPTH_STEP
        curve = self._curves.get(key)
        if curve is None:
            if len(self._curves) >= MAX_CURVES:
                self._curves.clear()
            curve = self.table.step_time_us(num_requests, num_requests * self._width, depth=key[1] * DEPTH_STEP)
            curve[:num_requests] = curve[num_requests]
            self._curves[key] = curve
        return curve

    def table_draft_us(self, num_requests: int, depth: int) -> float:
        """Return microseconds of drafting by the table alone."""
        key = num_requests, (depth + DEPTH_STEP // 2) // DEPTH_STEP
        draft_us = self._drafts.get(key)
        if draft_us is None:
            if len(self._drafts) >= MAX_CURVES:
                self._drafts.clear()
            draft_us = max(MIN_DRAFT_US, self.table.draft_time_us(num_requests, depth=key[1] * DEPTH_STEP))
            self._drafts[key] = draft_us
        return draft_us

    def observe_verify(
        self, num_requests: int, num_tokens: int, depth: int, measured_us: float, *, cost_scale: float = 1.0
    ) -> float:
        """Learn from one target pass; return the time that was predicted for it."""
        first, more = self._first_and_more(num_requests, num_tokens, depth, cost_scale)
        predicted = self._drift.observe_verify(first, more, measured_us)
        self._tell()
        return predicted

    def observe_draft(self, num_requests: int, depth: int, measured_us: float) -> float:
        """Learn from one draft, timed by itself; return the time that was predicted for it."""
        return self._drift.observe_draft(self.table_draft_us(num_requests, depth), measured_us)

    def observe_round(
        self,
        num_requests: int,
        num_tokens: int,
        num_drafted: int,
        depth: int,
        measured_us: float,
        *,
        cost_scale: float = 1.0,
    ) -> float:
        """Learn from a round with drafts of which only the whole was timed; return the time predicted for it.

        Args:
            num_requests: R.
            num_tokens: T of its target pass.
            num_drafted: requests that drafted.
            depth: tokens cached before each row, on average.
            measured_us: microseconds of drafting, target pass and acceptance.
            cost_scale: as it was planned with.
        """
        first, more = self._first_and_more(num_requests, num_tokens, depth, cost_scale)
        predicted = self._drift.observe_round(first, more, self.table_draft_us(num_drafted, depth), measured_us)
        self._tell()
        return predicted

    def observe_beside(self, drafts: bool, measured_us: float) -> None:
        """Learn what a round took beside its draft and its target pass."""
        self._beside[drafts].add(measured_us)

    def observe_untimed(self) -> None:
        """Count a round with drafts that could not be timed."""
        self._drift.observe_untimed()

    def _first_and_more(self, num_requests: int, num_tokens: int, depth: int, cost_scale: float) -> tuple[float, float]:
        """Return the table's microseconds of one token a request, and what the other tokens add to them."""
        curve = self.table_us(num_requests, depth)
        first = curve.item(num_requests)
        return first, cost_scale * (curve.item(min(num_tokens, len(curve) - 1)) - first)

    def _tell(self) -> None:
        """Log the correction where it has changed; asked every round, it looks at some."""
        self._untold += 1
        if self._untold < TELL_EVERY or self._untold % FIRST_TELL:
            return
        correction = self.correction
        changes = zip(_ratios(correction), _ratios(self._told), TOLD, strict=True)
        if all(1 / bound < now / told < bound for now, told, bound in changes):
            return
        self._told, self._untold = correction, 0
        logger.info(
            "the cost table is rescaled to the measured rounds: one token a request x%.2f, more tokens x%.2f, "
            "drafting x%.2f",
            *correction,
        )


def _ratios(correction: Correction) -> tuple[float, float, float]:
    """Return the base and the other two as shares of it: what may be told, in the order of `TOLD`."""
    return correction.base, correction.marginal / correction.base, correction.draft / correction.base


class _Mean:
    """Mean over the last `memory` values, about; one above `outlier` times it counts as that.

    It begins as the median of the first ones, or one of those that was interrupted would stand for long.
    """

    def __init__(self, memory: int, outlier: float) -> None:
        self.count, self.value = 0, 0.0
        self._memory, self._outlier = memory, outlier
        self._first: list[float] = []

    def add(self, value: float) -> None:
        self.count += 1
        if self.count <= BESIDE_ROUNDS:
            self._first.append(value)
            self.value = statistics.median(self._first)
        else:
            value = min(value, self._outlier * self.value)
            self.value += (value - self.value) / min(self.count, self._memory)
