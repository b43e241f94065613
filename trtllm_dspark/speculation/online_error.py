"""Calibration error of blocks that were not verified in full."""

from __future__ import annotations

import numpy as np

from trtllm_dspark.speculation.calibration import NUM_BINS, Calibration, Reals
from trtllm_dspark.speculation.online_window import Blocks

LEAST_LABELS = 50
"""A position with fewer says nothing."""


def label_error(calibration: Calibration, blocks: Blocks) -> tuple[float, float]:
    """Return the calibration error over labelled drafts: the expected one, mean over positions, and one without noise.

    The second number is the root of the squared error, over all labels, less what outcomes scatter by themselves: 0
    where the calibration is right, while the first has a floor that falls with the root of the number of labels. NaN
    where no position has enough labels.

    Source: the debiased estimator of Kumar, Liang and Ma, "Verified uncertainty calibration" (2019), section 5.
    """
    labelled = blocks.labelled()
    predicted = calibration.survival(blocks.logits)
    bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    positions = labelled.shape[1]
    index = (bins + np.arange(positions) * NUM_BINS)[labelled]
    outcome = blocks.survived()[labelled].astype(np.float64)
    size = positions * NUM_BINS
    count = np.bincount(index, minlength=size).reshape(positions, NUM_BINS)
    positive = np.bincount(index, outcome, size).reshape(positions, NUM_BINS)
    expected = np.bincount(index, predicted[labelled], size).reshape(positions, NUM_BINS)
    labels = count.sum(axis=1)
    enough = labels >= LEAST_LABELS
    if not enough.any():
        return float("nan"), float("nan")
    ece = np.abs(expected - positive).sum(axis=1) / np.maximum(labels, 1)
    many = np.maximum(count, 2)
    rate = positive / np.maximum(count, 1)
    squared = np.where(count > 1, ((expected - positive) / many) ** 2 - rate * (1 - rate) / (many - 1), 0.0)
    return float(ece[enough].mean()), float(np.sqrt(max((squared * count).sum() / count.sum(), 0.0)))


def log_likelihood(calibration: Calibration, blocks: Blocks) -> Reals:
    """Return [N] the log likelihood of each block's accepted length, given what was verified of it."""
    confidence = np.clip(calibration.confidence(blocks.logits), 1e-6, 1 - 1e-6)
    drafts = np.arange(confidence.shape[1])
    accepted = drafts < blocks.accepted[:, None]
    rejected = (drafts == blocks.accepted[:, None]) & blocks.labelled()
    return np.asarray(
        np.where(accepted, np.log(confidence), np.where(rejected, np.log1p(-confidence), 0.0)).sum(axis=1)
    )
