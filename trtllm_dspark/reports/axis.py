"""One axis of a plot: from values to pixels, and where its ticks stand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic scale.

    Attributes:
        low: value at pixel `start`.
        high: value at pixel `end`.
        start: pixel of `low`.
        end: pixel of `high`.
        log: whether the scale is logarithmic; `low` is then positive.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def shows(self, value: float) -> bool:
        """Whether a value has a place on the scale: finite, and positive on a logarithmic one."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def pixel(self, value: float) -> float:
        """Return where a value stands; values outside the range lie outside the pixels."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values inside the range, ascending."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def fit_axis(
    values: Iterable[float],
    *,
    start: float,
    end: float,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    from_zero: bool = False,
) -> Axis:
    """Return an axis that shows all values.

    Args:
        values: what it must show; those that have no place on it do not count.
        start: pixel of the low end.
        end: pixel of the high end.
        log: logarithmic.
        limits: low and high instead of those of the values.
        from_zero: start a linear axis at 0 when no value is negative.
    """
    if limits is not None:
        low, high = limits
    else:
        shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        low, high = (min(shown), max(shown)) if shown else (1.0, 10.0)
        if from_zero and not log and low > 0:
            low = 0.0
        if log:
            edge = (high / low) ** 0.03 if high > low else 1.0
            low, high = low / edge, high * edge
        else:
            high += 0.04 * (high - low)
            low -= 0.04 * (high - low) if low != 0 else 0.0
    if not high > low:
        low, high = (low / 1.5, low * 1.5) if log else (low - 0.5, low + 0.5)
    return Axis(low, high, start, end, log)


def format_tick(value: float) -> str:
    """Return a short text: 0.05, 80, 1.2k, 3M."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


def _linear_ticks(low: float, high: float, most: int = 7) -> list[float]:
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if power * factor >= raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten with 2 and 5 between, of few decades; powers of ten of many."""
    decades = math.log10(high / low)
    factors = (1.0,) if decades > 4 else (1.0, 2.0, 5.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    return inside if len(inside) >= 2 else _linear_ticks(low, high, 5)
