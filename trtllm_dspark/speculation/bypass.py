"""When to stop speculating, and when to try again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Standing:
    """What is known of one request: whether it rests, its average gain, and its poor rounds in a row."""

    resting: bool = False
    mean: float | None = None
    poor: int = 0


class Bypass:
    """Hysteresis over every request's own gain of speculating, counted in rounds, and when one that rests is probed.

    A request that loses rests by itself; a round drafts nothing while all rest.
    """

    def __init__(self) -> None:
        self.active = False
        self._standings: dict[Hashable, _Standing] = {}
        self._idle = self._left = 0
        self._period = PROBE_PERIOD

    def __len__(self) -> int:
        """Return the number of requests that are known."""
        return len(self._standings)

    def rests(self, request: Hashable) -> bool:
        """Whether a request decodes plainly."""
        standing = self._standings.get(request)
        return standing is not None and standing.resting

    def meet(self, requests: Sequence[Hashable]) -> None:
        """Take up requests that speculate from the beginning, as nothing is known yet."""
        for request in requests:
            self._standings.setdefault(request, _Standing())

    def step(self, requests: Sequence[Hashable], gains: Sequence[float], blocks: Sequence[float]) -> bool:
        """Judge the requests of a round; return whether one of those that rest is probed in it.

        Args:
            requests: those that may draft.
            gains: of each, predicted rate of speculating over that of plain decoding, minus 1; from past rounds.
            blocks: known of each, 0 = it is new.
        """
        any_rests = fresh = False
        self.active = True
        for request, gain, known in zip(requests, gains, blocks, strict=True):
            resting = self._judge(request, gain, known)
            self.active &= resting
            any_rests |= resting
            fresh |= resting and known == 0 and gain > HEAVY_LOSS
        if not any_rests:
            self._idle, self._left, self._period = 0, 0, PROBE_PERIOD
            return False
        if self._left > 0:
            self._left -= 1
            return True
        self._idle += 1
        if self._idle < (min(FRESH_PERIOD, self._period) if fresh else self._period):
            return False
        self._idle, self._left = 0, PROBE_ROUNDS - 1
        self._period = min(2 * self._period, MAX_PROBE_PERIOD)
        return True

    def forget(self, request: Hashable) -> None:
        """Drop a request that has ended."""
        self._standings.pop(request, None)

    def _judge(self, request: Hashable, gain: float, known: float) -> bool:
        """Return whether a request rests now."""
        standing = self._standings.get(request)
        if standing is None:
            # Of a new one nothing is known but what all promise.
            standing = self._standings[request] = _Standing(resting=gain < ENTER_GAIN)
            return standing.resting
        if standing.resting:
            if gain > LEAVE_GAIN:
                standing.resting, standing.mean, standing.poor = False, None, 0
            return standing.resting
        if not known:
            # What others show does not stop it.
            return False
        standing.mean = gain if standing.mean is None else standing.mean + SMOOTHING * (gain - standing.mean)
        if gain < HEAVY_LOSS:
            standing.poor += HEAVY_WEIGHT
        else:
            standing.poor = standing.poor + 1 if standing.mean < ENTER_GAIN else 0
        if standing.poor >= PATIENCE:
            standing.resting = True
            self._period = PROBE_PERIOD
        return standing.resting
