"""Blocks of drafts without a model: what a confidence head says of them, and how many the target would accept.

The joint model draws, for every draft of a block, the probability c that it is accepted given that all before it were,
and then whether it is. c is logit-normal around a position's mean; a part of its spread is common to the drafts of a
block and lives on from round to round, as an easy passage does. A head that says c is calibrated by construction; what
it says here is c bent by a temperature and a bias, and noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.errors import ConfigError

Reals = NDArray[np.float64]
_CLIP = 1e-4
_NODES = 17


@dataclass(frozen=True, slots=True)
class ConfidenceModel:
    """How confidences spread and how well they are calibrated.

    Attributes:
        spread: standard deviation of the logit of c around a position's mean; 0 = every block is alike, and
            confidence says nothing.
        correlation: share of that variance that the drafts of a block have in common, [0, 1].
        persistence: correlation of the common part of one block with that of the request's next, [0, 1).
        temperature: the head's logits are this times too large; 1 = calibrated, above 1 = too sure.
        bias: logit that has to be added after the temperature.
        noise: standard deviation of what the head's logits err by at random.
    """

    spread: float = 1.5
    correlation: float = 0.6
    persistence: float = 0.6
    temperature: float = 1.0
    bias: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not np.isfinite(getattr(self, field.name)):
                raise ConfigError(f"confidence model: {field.name} must be a finite number")
        if self.spread < 0 or self.noise < 0 or self.temperature <= 0:
            raise ConfigError("confidence model: spread and noise must not be negative, temperature must be above 0")
        if not 0 <= self.correlation <= 1 or not 0 <= self.persistence < 1:
            raise ConfigError("confidence model: correlation must lie in [0, 1] and persistence in [0, 1)")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of requests, one of two ways: as one request met them one after the other, or one for every token.

    With one for every token, a request that emits n tokens in a round goes on n blocks further, whatever it verifies:
    what greedy requests draft depends on where they stand in their text and not on how they got there.

    Attributes:
        confidence: [N, gamma] float32, what the head says, without calibration.
        accepted: [N] int64, drafts the target accepts when all are verified.
        starts: ascending indices of the first block of every text, where there is one block for every token; else None.
    """

    confidence: NDArray[np.float32]
    accepted: NDArray[np.int64]
    starts: tuple[int, ...] | None = None

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.accepted)

    def conditional(self) -> Reals:
        """Return [gamma] shares of drafts accepted among those whose prefix was; NaN where none was."""
        met = self.met
        reached = np.array([(met >= k).sum() for k in range(self.confidence.shape[1] + 1)], np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(reached[1:] / reached[:-1], np.float64)

    @property
    def accepted_len(self) -> float:
        """tau: tokens of a round that verifies the whole block, bonus included."""
        return float(self.met.mean()) + 1

    @property
    def met(self) -> NDArray[np.int64]:
        """Drafts accepted of the blocks that requests meet which verify all of them."""
        if self.starts is None:
            return self.accepted
        met, accepted = [], self.accepted.tolist()
        for start, end in zip(self.starts, (*self.starts[1:], len(accepted)), strict=True):
            index = start
            while index < end:
                met.append(accepted[index])
                index += accepted[index] + 1
        return np.array(met, np.int64)


def draw_blocks(
    conditional: Sequence[float], model: ConfidenceModel, count: int, generator: np.random.Generator
) -> Blocks:
    """Return blocks whose conditional acceptance by position is `conditional`.

    Args:
        conditional: [gamma] probability that draft k is accepted, given that all before it were.
        model: spread and calibration.
        count: N.
        generator: where all randomness comes from.
    """
    means = _logit_means(np.clip(np.asarray(conditional, np.float64), _CLIP, 1 - _CLIP), model)
    gamma = len(means)
    common = _autoregressive(generator.standard_normal(count), model.persistence)
    own = generator.standard_normal((count, gamma))
    shared = np.sqrt(model.correlation) * common[:, None] + np.sqrt(1 - model.correlation) * own
    logits = means + model.spread * shared
    accepts = generator.random((count, gamma)) < _sigmoid(logits)
    accepted = np.cumprod(accepts, axis=1).sum(axis=1).astype(np.int64)
    heard = (logits + model.noise * generator.standard_normal((count, gamma)) - model.bias) * model.temperature
    return Blocks(_sigmoid(heard).astype(np.float32), accepted)


def _logit_means(conditional: Reals, model: ConfidenceModel) -> Reals:
    """Return [gamma] means of the logits; blocks that survived are easier, so each depends on those before."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)  # type: ignore[no-untyped-call]
    weights = weights / weights.sum()
    common = np.sqrt(model.correlation) * nodes
    own = np.sqrt(1 - model.correlation) * nodes
    spread = model.spread * (common[:, None] + own[None, :])
    survivors = weights.copy()
    means = []
    for goal in conditional:
        low, high = -40.0, 40.0
        for _ in range(44):
            middle = (low + high) / 2
            by_common = _sigmoid(middle + spread) @ weights
            low, high = (middle, high) if survivors @ by_common < goal else (low, middle)
        means.append((low + high) / 2)
        survivors = survivors * (_sigmoid(means[-1] + spread) @ weights)
        survivors /= survivors.sum()
    return np.array(means)


def _autoregressive(noise: Reals, persistence: float) -> Reals:
    """Return a stationary chain of unit variance with the given correlation of neighbours."""
    if persistence == 0:
        return noise
    chain = np.empty_like(noise)
    fresh = np.sqrt(1 - persistence**2)
    value = chain[0] = noise[0]
    for index, step in enumerate((fresh * noise[1:]).tolist(), start=1):
        value = persistence * value + step
        chain[index] = value
    return chain


def _sigmoid(values: Reals) -> Reals:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)), np.float64)
