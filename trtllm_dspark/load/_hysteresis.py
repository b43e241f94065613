"""Two filters that keep decisions from following every twitch of the inputs."""

from __future__ import annotations

from collections import deque

# Samples come every 0.2 s give or take the thread's waking; a duration counts as over a little early.
_SLACK_S = 0.05


class HeldLevel:
    """A level that rises after `attack_s` of worse values and falls after `release_s` of better ones.

    It falls to the worst of the better values, so a value that flaps faster than `release_s` can raise it and cannot
    lower it.

    Args:
        neutral: the level without load; values are at least this.
        deadband: a difference up to it changes nothing, except that `neutral` itself is always reached again.
        attack_s: seconds, 0 = at once.
        release_s: seconds.
    """

    def __init__(self, *, neutral: float, deadband: float, attack_s: float, release_s: float) -> None:
        self.level = neutral
        self._neutral = neutral
        self._deadband = deadband
        self._attack_s = attack_s
        self._release_s = release_s
        self._worse_since: float | None = None
        self._better: tuple[float, float] | None = None

    @property
    def raised(self) -> bool:
        """Whether the level is above neutral."""
        return self.level > self._neutral

    def update(self, time_s: float, value: float, peak: tuple[float, float] | None = None) -> float:
        """Take one value and return the level.

        Args:
            time_s: monotonic seconds.
            value: what the level rises to.
            peak: since when the input has been at most what, which it falls to; None = the value itself, since now.
                Where `value` is a mean, this is the greatest reading in it: a mean hides the worst.
        """
        since, top = (time_s, value) if peak is None else peak
        if value > self.level + self._deadband:
            self._better = None
            self._worse_since = time_s if self._worse_since is None else self._worse_since
            if time_s - self._worse_since >= self._attack_s - _SLACK_S:
                self._set(value)
        elif top < self.level - self._deadband or (top == self._neutral and self.raised):
            self._worse_since = None
            self._better = (since, top) if self._better is None else (self._better[0], max(self._better[1], top))
            if time_s - self._better[0] >= self._release_s - _SLACK_S:
                self._set(self._better[1])
        else:
            self._worse_since = self._better = None
        return self.level

    def reset(self) -> None:
        """Return to neutral at once."""
        self._set(self._neutral)

    def _set(self, level: float) -> None:
        self.level = level
        self._worse_since = self._better = None


class Window:
    """The values of the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque()

    def add(self, time_s: float, value: float) -> None:
        """Take one value and forget those that are too old."""
        self._values.append((time_s, value))
        while len(self._values) > 1 and time_s - self._values[0][0] > self._seconds - _SLACK_S:
            self._values.popleft()

    def mean(self) -> float:
        """Return the mean; a value must have been added."""
        return sum(value for _, value in self._values) / len(self._values)

    def peak(self) -> tuple[float, float]:
        """Return the time of the oldest value and the greatest of all; a value must have been added."""
        return self._values[0][0], max(value for _, value in self._values)

    def falling_rate(self) -> float:
        """Return units lost a second when at least the last three steps all fell, else 0.

        One allocation is a step, not a trend.
        """
        tail = list(self._values)[-4:]
        if len(tail) < 4 or any(later[1] >= earlier[1] for earlier, later in zip(tail, tail[1:], strict=False)):
            return 0.0
        return (tail[0][1] - tail[-1][1]) / (tail[-1][0] - tail[0][0])

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
