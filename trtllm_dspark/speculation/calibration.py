"""Calibration of the confidence head: one temperature and one bias a position of the block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.errors import ConfigError

NUM_BINS = 20
Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Parameters of every position: confidence = sigmoid(logit / temperature + bias).

    Attributes:
        temperature: [gamma], each above 0.
        bias: [gamma].
    """

    temperature: tuple[float, ...]
    bias: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.temperature) != len(self.bias):
            raise ConfigError(
                f"a calibration has {len(self.temperature)} temperatures and {len(self.bias)} biases; fit it again"
            )
        finite = np.isfinite([*self.temperature, *self.bias]).all()
        if not finite or any(value <= 0 for value in self.temperature):
            raise ConfigError("a calibration needs finite numbers and temperatures above 0; fit it again")

    @staticmethod
    def identity(num_positions: int) -> Calibration:
        """Return the calibration that changes nothing."""
        return Calibration((1.0,) * num_positions, (0.0,) * num_positions)

    def arrays(self, num_positions: int) -> tuple[FloatArray, FloatArray]:
        """Return temperatures and biases of the first positions, [num_positions] float32 each."""
        parts = (np.array(values[:num_positions], np.float32) for values in (self.temperature, self.bias))
        temperature, bias = parts
        return temperature, bias

    def survival(self, logits: Reals) -> Reals:
        """Return [N, gamma] survivals, running products of the confidences, of [N, gamma] logits."""
        return np.cumprod(self.confidence(logits), axis=1)

    def confidence(self, logits: Reals) -> Reals:
        """Return [N, gamma] confidences of [N, gamma] logits."""
        return sigmoid(logits / np.array(self.temperature) + np.array(self.bias))


@dataclass(frozen=True)
class Observations:
    """Blocks that were verified in full.

    Attributes:
        logits: [N, gamma] float64, the confidence head's logits without calibration.
        accepted: [N] int64, drafts accepted, 0..gamma.
    """

    logits: Reals
    accepted: IntArray

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.accepted)

    def survived(self, position: int) -> NDArray[np.bool_]:
        """Return [N] whether the drafts up to `position`, counted from 0, were all accepted."""
        return self.accepted > position


@dataclass(frozen=True)
class Quality:
    """How well survivals foretell acceptance, by position.

    Attributes:
        ece: expected calibration error over 20 equal bins.
        auc: area under the ROC curve; NaN where all blocks or none survived.
    """

    ece: tuple[float, ...]
    auc: tuple[float, ...]

    @property
    def mean_ece(self) -> float:
        """Mean over the positions."""
        return float(np.mean(self.ece))


def evaluate(calibration: Calibration, observations: Observations) -> Quality:
    """Return the quality of calibrated survivals on observations."""
    survival = calibration.survival(observations.logits)
    positions = range(survival.shape[1])
    return Quality(
        ece=tuple(expected_calibration_error(survival[:, k], observations.survived(k)) for k in positions),
        auc=tuple(area_under_curve(survival[:, k], observations.survived(k)) for k in positions),
    )


def expected_calibration_error(predicted: Reals, outcome: NDArray[np.bool_]) -> float:
    """Return the mean distance between predicted probability and frequency over equal bins, weighted by their size."""
    index = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    excess = np.bincount(index, predicted - outcome, NUM_BINS)
    return float(np.abs(excess).sum() / len(predicted))


def area_under_curve(predicted: Reals, outcome: NDArray[np.bool_]) -> float:
    """Return the probability that a positive is predicted above a negative, ties counting half; NaN with one class."""
    positives = int(outcome.sum())
    negatives = len(outcome) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[inverse][outcome].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def sigmoid(values: Reals) -> Reals:
    """Return the logistic function."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)), np.float64)


def noise_floor(calibration: Calibration, observations: Observations, *, draws: int = 100, seed: int = 0) -> float:
    """Return the mean expected calibration error that these blocks would show if every survival were right.

    The error counts how outcomes scatter, so it is above 0 for the best of calibrations and falls with the root of the
    number of blocks. Outcomes are drawn from the predicted confidences `draws` times.
    """
    rng = np.random.default_rng(seed)
    confidence = calibration.confidence(observations.logits)
    survival = np.cumprod(confidence, axis=1)
    errors = []
    for _ in range(draws):
        survived = np.logical_and.accumulate(rng.uniform(size=confidence.shape) < confidence, axis=1)
        errors += [expected_calibration_error(survival[:, k], survived[:, k]) for k in range(survival.shape[1])]
    return float(np.mean(errors))
