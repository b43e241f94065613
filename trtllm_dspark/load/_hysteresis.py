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
        settle_s: seconds a smoothed value takes to follow its input; that long a better value is not yet believed.
    """

    def __init__(
        self, *, neutral: float, deadband: float, attack_s: float, release_s: float, settle_s: float = 0.0
    ) -> None:
        self.level = neutral
        self._neutral = neutral
        self._deadband = deadband
        self._attack_s = attack_s
        self._release_s = release_s
        self._settle_s = settle_s
        self._worse_since: float | None = None
        self._better_since: float | None = None
        self._worst_of_better = neutral

    @property
    def raised(self) -> bool:
        """Whether the level is above neutral."""
        return self.level > self._neutral

    def update(self, time_s: float, value: float) -> float:
        """Take one value and return the level."""
        if value > self.level + self._deadband:
            self._better_since = None
            self._worse_since = time_s if self._worse_since is None else self._worse_since
            if time_s - self._worse_since >= self._attack_s - _SLACK_S:
                self._set(value)
        elif value < self.level - self._deadband or (value == self._neutral and self.raised):
            self._worse_since = None
            self._better_since = time_s if self._better_since is None else self._better_since
            seconds = time_s - self._better_since
            if seconds <= self._settle_s + _SLACK_S:
                self._worst_of_better = value
            self._worst_of_better = max(self._worst_of_better, value)
            if seconds >= max(self._release_s, self._settle_s) - _SLACK_S:
                self._set(self._worst_of_better)
        else:
            self._worse_since = self._better_since = None
        return self.level

    def reset(self) -> None:
        """Return to neutral at once."""
        self._set(self._neutral)

    def _set(self, level: float) -> None:
        self.level = level
        self._worse_since = self._better_since = None


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
