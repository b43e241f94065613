"""Fit a calibration to blocks that were not verified in full, in a millisecond."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.speculation.calibration import Calibration, Reals
from trtllm_dspark.speculation.online_error import LEAST_LABELS
from trtllm_dspark.speculation.online_window import Blocks

STEPS = 6
"""Newton steps of a position at most; a fit begins where the last one ended, so one or two are usual."""
SMALL_STEP = 0.05
"""A step that moves no typical logit by more ends the search."""
LARGE_STEP = 2.0
PRIOR_LABELS = 2.0
"""Labels that the stored calibration is worth."""
SLOPES = (0.05, 20.0)


def fit_window(blocks: Blocks, *, start: Calibration, stored: Calibration) -> Calibration:
    """Return the temperatures and biases of greatest penalised likelihood, position after position.

    As `fit_calibration` does, on the running product with positions before held fixed, but by Fisher scoring and on
    the labelled drafts of every block. A draft is verified or not because of confidences up to its own, never because
    of its outcome, so the labels are those of the model wherever the scheduler looks; where it never looks the
    logistic form extrapolates, and the penalty pulls towards the stored calibration.

    Args:
        blocks: what was observed.
        start: where the search begins.
        stored: the calibration that the penalty pulls to.
    """
    labelled, survived = blocks.labelled(), blocks.survived()
    before = np.ones(len(blocks))
    temperatures, biases = [], []
    for position in range(blocks.logits.shape[1]):
        rows = labelled[:, position]
        logits = blocks.logits[:, position]
        slope, bias = _fit_position(
            logits[rows],
            before[rows],
            survived[rows, position],
            start=(1 / start.temperature[position], start.bias[position]),
            stored=(1 / stored.temperature[position], stored.bias[position]),
        )
        temperatures.append(1 / slope)
        biases.append(bias)
        before = before * _sigmoid(logits * slope + bias)
    return Calibration(tuple(temperatures), tuple(biases))


def _fit_position(
    logits: Reals,
    before: Reals,
    outcome: NDArray[np.bool_],
    *,
    start: tuple[float, float],
    stored: tuple[float, float],
) -> tuple[float, float]:
    """Return slope (1 / temperature) and bias of one position."""
    if len(logits) < LEAST_LABELS:
        # Nothing speaks for any change here: what older blocks have told of this position still holds.
        return start
    # So many labels, each of which tells at most a quarter about the chance at the centre and about the slope.
    centre, spread = float(logits.mean()), max(float(logits.std()), 0.5)
    penalty = PRIOR_LABELS * 0.25 * np.array([[spread**2 + centre**2, centre], [centre, 1.0]])
    point, anchor = np.array(start), np.array(stored)
    for _ in range(STEPS):
        chance = _sigmoid(logits * point[0] + point[1])
        predicted = np.minimum(before * chance, 1 - 1e-9)
        tail = (1 - chance) / (1 - predicted)
        residual = (outcome - predicted) * tail
        information = predicted * (1 - chance) * tail
        weighted = information * logits
        score = np.array([residual @ logits, residual.sum()]) - penalty @ (point - anchor)
        curvature = np.array([[weighted @ logits, weighted.sum()], [weighted.sum(), information.sum()]]) + penalty
        step = np.linalg.solve(curvature, score)
        largest = max(abs(step[0]) * spread, abs(step[0] * centre + step[1]))
        point = point + step * min(1.0, LARGE_STEP / max(largest, LARGE_STEP))
        point[0] = np.clip(point[0], *SLOPES)
        if largest < SMALL_STEP:
            break
    return float(point[0]), float(point[1])


def _sigmoid(values: Reals) -> Reals:
    """Return the logistic function; three times as fast as by `tanh`."""
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -500, 500))))
