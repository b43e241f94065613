"""The part of `_core` that mode adaptive uses; its rules are those of `_core.pyi`."""

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
Float = NDArray[np.float32]
Real = NDArray[np.float64]

class BlockStatistics:
    """What verifying drafts would have gained, request by request, from the blocks of past rounds (docs/adaptive.md).

    Requests are rows. Methods keep the GIL: they take microseconds, and threads may share an object that way.

    Args:
        max_draft_len: gamma, 1..64.
        thresholds: [C] float32, C in 1..64, least survivals that a request may ask of a draft, ascending.
        memory: weight of a block after one more of its request; what this and the other numbers are is written beside
            their values in `speculation/controller_gain.py`.

    Raises:
        ShapeError: wrong shape or dtype.
        NativeError: a number is out of range, or a row was never reset.
    """

    def __init__(
        self,
        max_draft_len: int,
        thresholds: Float,
        *,
        memory: float,
        pool_memory: float,
        prior_blocks: float,
        ratio_memory: float,
        ratio_prior: float,
        pool_drafts: float,
        max_ratio: float,
        hindsight_memory: float,
        hindsight_prior: float,
        hindsight_found: float,
    ) -> None: ...
    @property
    def empty(self) -> bool:
        """Whether no block was added yet."""
    @property
    def accepted_ratio(self) -> float:
        """Drafts accepted over drafts promised by all requests, recently."""
    def reset(self, row: int) -> None:
        """Make a row that of a request of which nothing is known; rows grow by one at a time."""
    def add(
        self, rows: Int, confidence: Float, verify_len: Int, accepted: Int, drafted: NDArray[np.bool_] | None = None
    ) -> int:
        """Learn one block of each of R different rows: compare it with what was expected of it, then keep it.

        Args:
            rows: [R] int64, -1 for a request that has ended: of that nothing is learned.
            confidence: [R, gamma] float32, calibrated; NaN and what is below 0 count as 0.
            verify_len: [R] int64 drafts verified, 0..gamma.
            accepted: [R] int64 drafts accepted, 0..gamma; -1 for a request whose logits were refused: nothing either.
            drafted: [R] bool, requests that have a block; None = all.

        Returns:
            The number of blocks learned.
        """
    def evaluate(
        self,
        rows: Int,
        caps: Int,
        verify_us: Float,
        draft_us: float,
        base: float = 1.0,
        marginal: float = 1.0,
    ) -> tuple[float, float]:
        """Choose the threshold of each of R rows as if the whole batch were like it.

        Args:
            rows: [R] int64.
            caps: [R] int64, drafts of each that may be verified; those without any do not enter the means.
            verify_us: [R * (gamma + 1) + 1] float32 microseconds of a pass over T tokens of R requests, as measured once.
            draft_us: microseconds of a draft for all.
            base: factor on `verify_us[R]`, a pass over one token of each.
            marginal: factor on what more tokens add to it.

        Returns:
            Means of the predicted rate of speculating over that of plain decoding, minus 1, and of the threshold, each
            taken as 1 at most.
        """
    def worth(self, rows: Int) -> Real:
        """Return [3, R] float64 as evaluated last, 0 for rows that never were.

        The predicted rate of speculating over that of plain decoding, minus 1; tokens that drafts add; microseconds that
        verifying them takes, as one request's part of a batch.
        """
    def verify_lens(
        self, rows: Int, caps: Int, confidence: Float, *, budget: int, unknown: float, probed: int = -1
    ) -> Int:
        """Return [R] int64 drafts to verify: those before the first whose survival is below its request's threshold.

        What the budget cannot hold is cut in (step, request) order, as `schedule_prefixes` does in mode `threshold`.

        Args:
            rows: [R] int64, -1 for a request without a row.
            caps: [R] int64 >= 0, most drafts of each request.
            confidence: [R, gamma] float32, calibrated; NaN counts as 0, what is out of [0, 1] as the nearer end.
            budget: drafts of all that may be verified.
            unknown: threshold of row -1 and of rows that were never evaluated.
            probed: row of which one draft is verified whatever its survival, if the budget holds it; -1 = none.
        """
    def thresholds(self, rows: Int, unknown: float) -> Float:
        """Return [R] float32 thresholds as evaluated last; `unknown` for row -1 and rows that never were."""
    def blocks(self, rows: Int) -> Real:
        """Return [R] float64 blocks that count, old ones less."""

class CostDrift:
    """How measured times correct a cost table while it is used (docs/adaptive.md).

    A pass is predicted as `base * first_us + marginal * more_us`, a draft as `draft * draft_us`: times by the table of one
    token a request, of what the pass's other tokens add to that, and of a draft. A Kalman filter follows what moves all
    three at once, and their ratios slowly. Where only whole rounds are timed, what they take beyond the base corrects
    marginal and draft alike. Methods keep the GIL, as those of `BlockStatistics`.

    Args:
        noise: standard deviation of a measured time, as a share of it; what this and the other numbers are is written
            beside their values in `speculation/drift.py`.

    Attributes:
        base: measured over predicted time of a pass over one token a request.
        marginal: of what more tokens add to it.
        draft: of drafting.
        rounds_unmeasured: rounds with drafts, timed or not, since the last timed pass without.

    Raises:
        NativeError: a number is out of range, or a table time that is divided by is not above 0.
    """

    def __init__(
        self,
        *,
        noise: float,
        common: float,
        ratio: float,
        doubt: float,
        shape: float,
        memory: float,
        flat: float,
        surprise: float,
        outlier: float,
        base_bound: float,
        marginal_bound: float,
        draft_bound: float,
    ) -> None: ...
    @property
    def base(self) -> float: ...
    @property
    def marginal(self) -> float: ...
    @property
    def draft(self) -> float: ...
    @property
    def rounds_unmeasured(self) -> int: ...
    def observe_verify(self, first_us: float, more_us: float, measured_us: float) -> float:
        """Learn from one target pass; return the microseconds that were predicted for it."""
    def observe_draft(self, draft_us: float, measured_us: float) -> float:
        """Learn from one draft, timed by itself; return the microseconds that were predicted for it."""
    def observe_round(self, first_us: float, more_us: float, draft_us: float, measured_us: float) -> float:
        """Learn from a round with drafts of which only the whole was timed; return what was predicted for it."""
    def observe_untimed(self) -> None:
        """Count a round with drafts that could not be timed."""

class RoundVerdict:
    """Who of a round's requests rests, and what the drafts of the others bring together.

    Attributes:
        num_judged: requests that may draft.
        num_resting: how many of those rest.
        entered: whether one that speculated rests now.
        fresh: whether one that rests is new and loses no more than `heavy_loss`.
        span: rows of the batch from the first to the last that drafts; 0 where none does.
        extra_tokens: that the drafts are expected to add.
        more_us: microseconds that verifying them is expected to take.
        caps: [R] int64, drafts of each that may be verified: none of those that rest. A new array each time.
    """

    @property
    def num_judged(self) -> int: ...
    @property
    def num_resting(self) -> int: ...
    @property
    def entered(self) -> bool: ...
    @property
    def fresh(self) -> bool: ...
    @property
    def span(self) -> int: ...
    @property
    def extra_tokens(self) -> float: ...
    @property
    def more_us(self) -> float: ...
    @property
    def caps(self) -> Int: ...

class Standings:
    """Which requests rest from speculating: hysteresis over every request's own gain, in rounds (docs/adaptive.md).

    Requests are rows. Methods keep the GIL, as those of `BlockStatistics`.

    Args:
        enter: a request rests where its average gain is less than this for `patience` rounds in a row.
        leave: one that rests goes on above this.
        heavy_loss: a round below this counts as `heavy_weight` of them.
        smoothing: weight of a round in the average.
        patience: rounds, at least 1.
        heavy_weight: rounds, at least 1.
    """

    def __init__(
        self, *, enter: float, leave: float, heavy_loss: float, smoothing: float, patience: int, heavy_weight: int
    ) -> None: ...
    def reset(self, row: int) -> None:
        """Make a row that of a request that was never judged; rows grow by one at a time."""
    def meet(self, rows: Int) -> None:
        """Let those of [R] rows speculate that were never judged."""
    def judge(self, rows: Int, caps: Int, blocks: BlockStatistics) -> RoundVerdict:
        """Judge the requests of a round by their gains as evaluated last.

        Args:
            rows: [R] int64.
            caps: [R] int64, drafts of each that may be verified; those without any are not judged.
            blocks: what has their gains; one that has no block of its own is new, and what others show does not stop it.

        Raises:
            NativeError: one that is judged was not evaluated since its row was reset.
        """
