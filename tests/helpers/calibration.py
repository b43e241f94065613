"""Blocks whose acceptance is known, and a confidence head that misjudges it."""

from __future__ import annotations

import numpy as np

from trtllm_dspark.speculation.calibration import Observations, sigmoid


def miscalibrated_blocks(count: int, *, scale: float, shift: float, seed: int, gamma: int = 5) -> Observations:
    """Return blocks whose head says scale * (logit + shift) where the truth is logit."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(count, gamma)) * 1.2
    right = rng.uniform(size=(count, gamma)) < sigmoid(truth)
    return Observations(scale * (truth + shift), np.cumprod(right, axis=1).sum(axis=1))
