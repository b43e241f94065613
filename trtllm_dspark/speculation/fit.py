"""Fit a calibration: sequential temperature scaling, and the bias it lacks."""

from __future__ import annotations

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
from trtllm_dspark.speculation.online_fit import fit_window
from trtllm_dspark.speculation.online_window import Blocks

MIN_BLOCKS = 500
"""With fewer the bins hold so little that noise is fitted."""
LOSS_SLACK = 0.005
"""How much worse than the best log loss a temperature may be; a constant is calibrated too, but says nothing."""
TEMPERATURES = np.geomspace(0.2, 5.0, 33)
FINER = 4
"""Steps into which the second search divides a step of the first."""
MAX_PASSES = 20


def fit_calibration(observations: Observations, *, with_bias: bool = True) -> Calibration:
    """Fit position after position on the running product, positions before held fixed.

    Temperature and bias together are those of greatest likelihood: a search for the least calibration error, which is
    mostly scatter over a few thousand blocks, chooses among scatter and judges no better on other blocks. Temperatures
    alone, which cannot remove a shift, are as the paper has them: of least expected calibration error, among those
    whose log loss is within half a percent of the best, so that they keep telling good drafts from bad ones.

    Args:
        observations: blocks verified in full.
        with_bias: False fits temperatures alone.

    Raises:
        ConfigError: too few blocks.

    Source: DSpark paper, section 3.2.1.
    """
    count, positions = observations.logits.shape
    if count < MIN_BLOCKS:
        raise ConfigError(
            f"{count} whole blocks are too few to calibrate, {MIN_BLOCKS} are the least; "
            "give more prompts or raise --max_tokens"
        )
    if with_bias:
        return _most_likely(observations)
    survival = np.ones(count)
    temperatures = []
    for position in range(positions):
        logits, outcome = observations.logits[:, position], observations.survived(position)
        temperature = _fit_temperature(logits, survival, outcome)
        survival = survival * sigmoid(logits / temperature)
        temperatures.append(temperature)
    return Calibration(tuple(temperatures), (0.0,) * positions)


def _most_likely(observations: Observations) -> Calibration:
    count, positions = observations.logits.shape
    whole = np.full(count, positions)
    blocks = Blocks(observations.logits, whole, observations.accepted, np.arange(count))
    identity = found = Calibration.identity(positions)
    for _ in range(MAX_PASSES):
        before, found = found, fit_window(blocks, start=found, stored=identity)
        if np.allclose([*before.temperature, *before.bias], [*found.temperature, *found.bias], rtol=1e-3, atol=1e-3):
            break
    return found


def _fit_temperature(logits: Reals, survival: Reals, outcome: NDArray[np.bool_]) -> float:
    coarse = _search(logits, survival, outcome, TEMPERATURES)
    ratio = TEMPERATURES[1] / TEMPERATURES[0]
    return _search(logits, survival, outcome, coarse * ratio ** np.linspace(-1, 1, 2 * FINER + 1))


def _search(logits: Reals, survival: Reals, outcome: NDArray[np.bool_], temperatures: Reals) -> float:
    tried = [(*_score(logits, survival, outcome, t), t) for t in temperatures.tolist()]
    best = min(loss for loss, *_ in tried)
    near = [(error, loss, temperature) for loss, error, temperature in tried if loss <= best * (1 + LOSS_SLACK)]
    return float(min(near)[2])


def _score(logits: Reals, survival: Reals, outcome: NDArray[np.bool_], temperature: float) -> tuple[float, float]:
    """Return log loss and calibration error of the running product."""
    predicted = survival * sigmoid(logits / temperature)
    clipped = np.clip(predicted, 1e-12, 1 - 1e-12)
    loss = -float(np.where(outcome, np.log(clipped), np.log1p(-clipped)).mean())
    return loss, expected_calibration_error(predicted, outcome)
