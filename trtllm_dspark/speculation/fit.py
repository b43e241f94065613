"""Fit a calibration: sequential temperature scaling, and the bias it lacks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation.calibration import (
    Calibration,
    Observations,
    Reals,
    expected_calibration_error,
    sigmoid,
)

MIN_BLOCKS = 500
"""With fewer the bins hold so little that noise is fitted."""
LOSS_SLACK = 0.005
"""How much worse than the best log loss a candidate may be; a constant is calibrated too, but says nothing."""
TEMPERATURES = np.geomspace(0.2, 5.0, 33)
BIASES = np.linspace(-4.0, 4.0, 33)
FINER = 4
"""Steps into which the second search divides a step of the first."""


def fit_calibration(observations: Observations, *, with_bias: bool = True) -> Calibration:
    """Fit position after position on the running product, positions before held fixed.

    A position's parameters are those of least expected calibration error among the ones whose log loss is within half a
    percent of the best, so that a fit never pays for calibration with the power to tell good drafts from bad ones.

    Args:
        observations: blocks verified in full.
        with_bias: False fits temperatures alone, as the paper does.

    Raises:
        ConfigError: too few blocks.

    Source: DSpark paper, section 3.2.1.
    """
    if len(observations) < MIN_BLOCKS:
        raise ConfigError(
            f"{len(observations)} whole blocks are too few to calibrate, {MIN_BLOCKS} are the least; "
            "give more prompts or raise --max_tokens"
        )
    survival = np.ones(len(observations))
    temperatures, biases = [], []
    for position in range(observations.logits.shape[1]):
        logits, outcome = observations.logits[:, position], observations.survived(position)
        temperature, bias = _fit_position(logits, survival, outcome, with_bias=with_bias)
        survival = survival * sigmoid(logits / temperature + bias)
        temperatures.append(temperature)
        biases.append(bias)
    return Calibration(tuple(temperatures), tuple(biases))


def _fit_position(
    logits: Reals, survival: Reals, outcome: NDArray[np.bool_], *, with_bias: bool
) -> tuple[float, float]:
    biases = BIASES if with_bias else np.zeros(1)
    coarse = _search(logits, survival, outcome, TEMPERATURES, biases)
    ratio, step = TEMPERATURES[1] / TEMPERATURES[0], (BIASES[1] - BIASES[0] if with_bias else 0.0)
    offsets = np.linspace(-1, 1, 2 * FINER + 1)
    near = coarse[1] + offsets * step if with_bias else np.zeros(1)
    return _search(logits, survival, outcome, coarse[0] * ratio**offsets, near)


def _search(
    logits: Reals, survival: Reals, outcome: NDArray[np.bool_], temperatures: Reals, biases: Reals
) -> tuple[float, float]:
    tried = [(*_score(logits, survival, outcome, t, b), t, b) for t, b in _grid(temperatures, biases)]
    best = min(loss for loss, *_ in tried)
    _, _, temperature, bias = min(
        (entry for entry in tried if entry[0] <= best * (1 + LOSS_SLACK)), key=lambda entry: (entry[1], entry[0])
    )
    return temperature, bias


def _grid(temperatures: Reals, biases: Reals) -> Iterator[tuple[float, float]]:
    return ((float(temperature), float(bias)) for temperature in temperatures for bias in biases)


def _score(
    logits: Reals, survival: Reals, outcome: NDArray[np.bool_], temperature: float, bias: float
) -> tuple[float, float]:
    """Return log loss and calibration error of the running product."""
    predicted = survival * sigmoid(logits / temperature + bias)
    clipped = np.clip(predicted, 1e-12, 1 - 1e-12)
    loss = -float(np.where(outcome, np.log(clipped), np.log1p(-clipped)).mean())
    return loss, expected_calibration_error(predicted, outcome)
