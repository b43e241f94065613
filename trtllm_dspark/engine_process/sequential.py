"""Which of two drafters has the longer accepted length: a test that may be looked at after every request.

A fixed-size test that is looked at again and again finds a difference where there is none. The interval here is the
mixture sequential probability ratio test's (Johari, Koomen, Pekelis, Walsh, "Always valid inference", 2022): it covers
the true difference at all times at once with probability 1 - alpha, up to the normal approximation of the means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EFFECT_SCALE = 0.3
"""Standard deviation of the differences the test expects, in tokens a round; any value is valid, this one is quick."""


@dataclass(slots=True)
class RatioSums:
    """Emitted tokens and verify rounds of one arm's requests, and what the variance of their ratio needs."""

    requests: int = 0
    emitted: float = 0.0
    rounds: float = 0.0
    emitted_squared: float = 0.0
    rounds_squared: float = 0.0
    product: float = 0.0

    def add(self, emitted: int, rounds: int) -> None:
        """Count one request."""
        self.requests += 1
        self.emitted += emitted
        self.rounds += rounds
        self.emitted_squared += emitted * emitted
        self.rounds_squared += rounds * rounds
        self.product += emitted * rounds

    @property
    def accepted_len(self) -> float | None:
        """Tokens emitted a round over all requests."""
        return self.emitted / self.rounds if self.rounds else None

    def variance(self) -> float:
        """Return the variance of `accepted_len` (delta method; requests are independent, rounds of one are not)."""
        ratio = self.emitted / self.rounds
        residual = self.emitted_squared - 2 * ratio * self.product + ratio * ratio * self.rounds_squared
        return max(0.0, residual) / self.rounds**2 * self.requests / (self.requests - 1)


def difference_interval(incumbent: RatioSums, candidate: RatioSums, *, alpha: float) -> tuple[float, float] | None:
    """Return an interval for the candidate's accepted length less the incumbent's; None before there are two of each.

    Args:
        incumbent: the arm to compare with.
        candidate: the arm on trial.
        alpha: probability that the interval ever misses the true difference.
    """
    if min(incumbent.requests, candidate.requests) < 2 or not (incumbent.rounds and candidate.rounds):
        return None
    difference = candidate.emitted / candidate.rounds - incumbent.emitted / incumbent.rounds
    variance = incumbent.variance() + candidate.variance()
    if variance <= 0.0:
        return difference, difference
    mixed = variance + EFFECT_SCALE**2
    half = math.sqrt(variance * mixed / EFFECT_SCALE**2 * (2 * math.log(1 / alpha) + math.log(mixed / variance)))
    return difference - half, difference + half
