"""When to stop speculating, and when to try again."""

from __future__ import annotations

from typing import Literal

ENTER_GAIN = 0.0
"""A bypass begins where speculation promises less than this over plain decoding, on average over recent rounds."""
SMOOTHING = 0.1
"""Weight of a round in that average: the gain of ten blocks is noisy, and leaving the gain of many behind is dear."""
LEAVE_GAIN = 0.03
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

Step = Literal["speculate", "bypass", "probe"]


class Bypass:
    """Hysteresis over the predicted gain of speculating, counted in rounds."""

    def __init__(self) -> None:
        self.active = False
        self._mean: float | None = None
        self._poor = 0
        self._idle = 0
        self._left = 0
        self._period = PROBE_PERIOD

    def step(self, gain: float, *, fresh: bool) -> Step:
        """Return what the next round does.

        Args:
            gain: predicted rate of speculating over that of plain decoding, minus 1; from past rounds.
            fresh: whether a request is there of which no block is known.
        """
        if self.active:
            return self._bypassed(gain, fresh=fresh)
        self._mean = gain if self._mean is None else self._mean + SMOOTHING * (gain - self._mean)
        if gain < HEAVY_LOSS:
            self._poor += HEAVY_WEIGHT
        else:
            self._poor = self._poor + 1 if self._mean < ENTER_GAIN else 0
        if self._poor < PATIENCE:
            return "speculate"
        self.active = True
        self._idle, self._left, self._period = 0, 0, PROBE_PERIOD
        return "bypass"

    def _bypassed(self, gain: float, *, fresh: bool) -> Step:
        if gain > LEAVE_GAIN:
            self.active, self._mean, self._poor = False, None, 0
            return "speculate"
        if self._left > 0:
            self._left -= 1
            return "probe"
        self._idle += 1
        soon = fresh and gain > HEAVY_LOSS
        if self._idle < (min(FRESH_PERIOD, self._period) if soon else self._period):
            return "bypass"
        self._idle, self._left = 0, PROBE_ROUNDS - 1
        self._period = min(2 * self._period, MAX_PROBE_PERIOD)
        return "probe"
