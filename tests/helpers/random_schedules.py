"""Random inputs of a schedule: ties, zeros, ones, staircases, caps, other rows, load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Case:
    """One batch to schedule; see `trtllm_dspark._core.schedule_prefixes`."""

    confidence: np.ndarray
    caps: np.ndarray | None
    step_time_us: np.ndarray
    token_budget: int | None
    load_scale: float
    extra_tokens: int
    fixed_time_us: float

    def costs(self) -> dict[str, object]:
        """Return the arguments of a cost-based schedule."""
        return {
            "step_time_us": self.step_time_us,
            "token_budget": self.token_budget,
            "load_scale": self.load_scale,
            "extra_tokens": self.extra_tokens,
            "fixed_time_us": self.fixed_time_us,
        }

    def with_confidence(self, confidence: np.ndarray) -> Case:
        return replace(self, confidence=confidence)


def random_cases(count: int, *, seed: int, max_requests: int = 8, max_gamma: int = 7) -> Iterator[Case]:
    """Yield `count` cases; about half the confidences are drawn from a few round values, so that ties are common."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        num_requests, gamma = int(rng.integers(0, max_requests + 1)), int(rng.integers(1, max_gamma + 1))
        round_values = rng.choice([0, 0.25, 0.5, 0.75, 1, 1], (num_requests, gamma))
        smooth = rng.beta(rng.uniform(1, 6), 1.5, (num_requests, gamma))
        confidence = np.where(rng.random((num_requests, 1)) < 0.5, round_values, smooth).astype(np.float32)
        extra = int(rng.choice([0, 0, 3]))
        yield Case(
            confidence=confidence,
            caps=rng.integers(0, gamma + 1, num_requests) if rng.random() < 0.3 else None,
            step_time_us=random_table(rng, num_requests * (gamma + 1) + extra + 1),
            token_budget=int(rng.integers(0, num_requests * gamma + 2)) if rng.random() < 0.2 else None,
            load_scale=float(rng.choice([1, 1, 0.5, 2.25])),
            extra_tokens=extra,
            fixed_time_us=float(rng.choice([0, 0, 7.5])),
        )


def random_table(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return [size] microseconds: a line, a staircase, random rises, or t(B) = B / 2, where certain tokens tie."""
    start, slope = rng.uniform(0.5, 40), rng.choice([0.1, 0.5, 1.0, 3.0])
    kind = rng.integers(0, 4)
    if kind == 3:
        return np.maximum(np.arange(size), 1).astype(np.float32) / 2
    if kind == 0:
        rises = np.full(size, slope)
    elif kind == 1:
        rises = np.where(np.arange(size) % rng.integers(2, 9) == 0, slope * 4, 0.0)
    else:
        rises = rng.choice([0, 0, slope, 5 * slope], size)
    return (start + np.cumsum(rises)).astype(np.float32)
