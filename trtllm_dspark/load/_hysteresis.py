"""Two filters that keep decisions from following every twitch of the inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# Samples come every 0.2 s give or take the thread's waking; a duration counts as over a little early.
_SLACK_S = 0.05
_Fold = Callable[[float, float], float]


class HeldLevel:
    """A level that rises after `attack_s` of worse values and falls after `release_s` of better ones.

    It rises to the least of the worse values and falls to the greatest of the better ones, so a value that flaps
    faster than `release_s` can raise it and cannot lower it.

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
        self._worse: tuple[float, float] | None = None
        self._better: tuple[float, float] | None = None

    @property
    def raised(self) -> bool:
        """Whether the level is above neutral."""
        return self.level > self._neutral

    def update(self, time_s: float, value: float) -> float:
        """Take one value and return the level."""
        worse = value > self.level + self._deadband
        better = value < self.level - self._deadband or (value == self._neutral and self.raised)
        self._worse = _run(self._worse, time_s, value, min) if worse else None
        self._better = _run(self._better, time_s, value, max) if better else None
        for run, seconds in ((self._worse, self._attack_s), (self._better, self._release_s)):
            if run is not None and time_s - run[0] >= seconds - _SLACK_S:
                self.level = run[1]
                self._worse = self._better = None
                break
        return self.level

    def reset(self) -> None:
        """Return to neutral at once."""
        self.level, self._worse, self._better = self._neutral, None, None


def _run(run: tuple[float, float] | None, time_s: float, value: float, fold: _Fold) -> tuple[float, float]:
    """Extend a run of (since when, extreme value)."""
    return (time_s, value) if run is None else (run[0], fold(run[1], value))


class Window:
    """The values of the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque()

    def add(self, time_s: float, value: float) -> None:
        """Take one value and forget those that are too old."""
        self._values.append((time_s, value))
        while time_s - self._values[0][0] > self._seconds - _SLACK_S:
            self._values.popleft()

    def mean(self) -> float:
        """Return the mean; a value must have been added."""
        return sum(value for _, value in self._values) / len(self._values)

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
