"""When to stop speculating, and when to try again."""

from __future__ import annotations

from trtllm_dspark import _core
from trtllm_dspark.engine.base import IntArray

ENTER_GAIN = 0.02
"""A bypass begins where speculation promises less than this over plain decoding, on average over recent rounds."""
SMOOTHING = 0.1
"""Weight of a round in that average: the gain of ten blocks is noisy, and leaving the gain of many behind is dear."""
LEAVE_GAIN = 0.05
"""Speculation is taken up again when it promises this much; the gap keeps a gain near the margin from flapping."""
PATIENCE = 8
"""Rounds in a row whose average must promise too little before a bypass begins."""
HEAVY_LOSS = -0.1
"""A round that promises less than this counts as several of them."""
HEAVY_WEIGHT = 4
PROBE_ROUNDS = 3
"""Rounds of one probe: as many blocks outweigh what is known of all requests in what is known of one."""
FRESH_PERIOD = 32
"""Rounds between two probes at least, when a request has joined of which nothing is known; not at a heavy loss."""
PROBE_PERIOD = 64
"""Rounds between two probes at first."""
MAX_PROBE_PERIOD = 256
"""Probes that find nothing double their distance up to this."""
PROBE_SHARE = 0.01
"""Share of the time that probes of a round in which all rest may take: where a draft is dear they are further apart."""


def standings() -> _core.Standings:
    """Return standings without any request."""
    return _core.Standings(
        enter=ENTER_GAIN,
        leave=LEAVE_GAIN,
        heavy_loss=HEAVY_LOSS,
        smoothing=SMOOTHING,
        patience=PATIENCE,
        heavy_weight=HEAVY_WEIGHT,
    )


class Bypass:
    """Hysteresis over every request's own gain of speculating, counted in rounds, and when one that rests is probed.

    A request that loses rests by itself; a round drafts nothing while all rest. Requests are rows.

    Attributes:
        active: whether all rest.
    """

    def __init__(self) -> None:
        self.active = False
        self._standings = standings()
        self._idle = self._left = 0
        self._period = PROBE_PERIOD
        self._least = 0.0

    def price(self, probe_rounds: float) -> None:
        """Tell how many plain rounds the draft and the verified token of one probe round take."""
        self._least = PROBE_ROUNDS * probe_rounds / PROBE_SHARE

    def reset(self, row: int) -> None:
        """Make a row that of a new request."""
        self._standings.reset(row)

    def meet(self, rows: IntArray) -> None:
        """Take up [R] requests that speculate from the beginning, as nothing is known yet."""
        self._standings.meet(rows)

    def step(self, rows: IntArray, caps: IntArray, blocks: _core.BlockStatistics) -> tuple[_core.RoundVerdict, bool]:
        """Judge the requests of a round.

        Args:
            rows: [R] int64.
            caps: [R] int64, drafts of each that may be verified; those without any are not judged.
            blocks: where each was evaluated by past rounds.

        Returns:
            Who rests and what the others gain, and whether one of those that rest is probed in this round.
        """
        verdict = self._standings.judge(rows, caps, blocks)
        self.active = verdict.num_resting == verdict.num_judged
        if verdict.entered:
            self._period = PROBE_PERIOD
        if not verdict.num_resting:
            self._idle, self._left, self._period = 0, 0, PROBE_PERIOD
            return verdict, False
        if self._left > 0:
            self._left -= 1
            return verdict, True
        self._idle += 1
        period = min(FRESH_PERIOD, self._period) if verdict.fresh else self._period
        if self._idle < (max(period, self._least) if self.active else period):
            return verdict, False
        self._idle, self._left = 0, PROBE_ROUNDS - 1
        self._period = min(2 * self._period, MAX_PROBE_PERIOD)
        return verdict, True
