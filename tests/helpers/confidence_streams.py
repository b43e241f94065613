"""Rounds of a drafter of known acceptance whose confidence head misjudges it, cut as a scheduler cuts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.engine.base import IntArray
from trtllm_dspark.speculation.calibration import Calibration, Observations, Reals, sigmoid
from trtllm_dspark.speculation.online_calibration import OnlineCalibration
from trtllm_dspark.speculation.online_error import label_error
from trtllm_dspark.speculation.online_window import Blocks

GAMMA = 5
PROBE_EVERY = 20
"""Rounds between two that verify the whole block, as probes do."""


@dataclass(frozen=True)
class Head:
    """A head that says scale * (logit + shift) where the truth is logit, for drafts of a mean logit."""

    scale: float = 1.0
    shift: float = 0.0
    mean: float = 0.8


def blocks_of(head: Head, count: int, rng: np.random.Generator) -> Observations:
    """Return blocks verified in full; positions of a block are as good as each other half by half."""
    common = rng.normal(size=(count, 1))
    truth = head.mean + 1.2 * np.sqrt(0.5) * (common + rng.normal(size=(count, GAMMA)))
    right = rng.uniform(size=(count, GAMMA)) < sigmoid(truth)
    return Observations(head.scale * (truth + head.shift), np.cumprod(right, axis=1).sum(axis=1))


def serve(
    online: OnlineCalibration,
    head: Callable[[int], Head],
    *,
    rounds: int,
    batch: int,
    seed: int,
    threshold: float | None = None,
    after: Callable[[int], None] = lambda _: None,
) -> None:
    """Feed rounds to a calibration; with a threshold a round verifies what the calibrated survivals allow."""
    rng = np.random.default_rng(seed)
    for index in range(rounds):
        blocks = blocks_of(head(index), batch, rng)
        verified: IntArray = np.full(batch, GAMMA)
        if threshold is not None and index % PROBE_EVERY:
            verified = (online.calibration.survival(blocks.logits) >= threshold).sum(axis=1)
        raw: Reals = sigmoid(blocks.logits)
        online.observe(raw.astype(np.float32), verified, np.minimum(blocks.accepted, verified))
        after(index)


def true_error(calibration: Calibration, head: Head, *, count: int = 10000) -> float:
    """Return the mean ECE over the positions, on blocks nobody learned from."""
    return label_error(calibration, whole_blocks(head, count, 10_000))[0]


def whole_blocks(head: Head, count: int, seed: int) -> Blocks:
    """Return blocks verified in full."""
    blocks = blocks_of(head, count, np.random.default_rng(seed))
    return Blocks(blocks.logits, np.full(count, GAMMA), blocks.accepted, np.arange(count))
