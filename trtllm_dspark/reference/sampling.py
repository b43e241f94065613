"""Logits to laws, and the random draws from them, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.reference._layers import softmax

Law = NDArray[np.float64]
GREEDY_TEMPERATURE = 1e-5


def token_law(logits: NDArray[Any], temperature: float, top_k: int = 0, top_p: float = 1.0) -> Law:
    """Return the [V] law of one logit row after temperature, top-k and top-p; a point mass when it is greedy.

    Tokens whose logit equals the last one kept are kept too, so that no filter depends on the order of ids.

    Args:
        logits: [V] floats; -inf excludes a token.
        temperature: below 1e-5 the law is the point mass of the largest logit, lowest id among equals.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set of largest logits whose mass is at least this; 1 keeps all.

    Returns:
        Probabilities that sum to one.
    """
    row = np.asarray(logits, np.float64)
    if temperature < GREEDY_TEMPERATURE:
        return np.asarray(np.arange(len(row)) == np.argmax(row), np.float64)
    kept = np.ones(len(row), np.bool_)
    if 0 < top_k < len(row):
        kept = row >= np.sort(row)[-top_k]
    law: Law = np.where(kept, softmax(row / temperature), 0.0)
    law /= law.sum()
    if top_p < 1:
        # Mass of the tokens at least as likely as each one: keep those that the tokens above do not already cover.
        above = np.array([law[row > logit].sum() for logit in row])
        law = np.where(kept & (above < top_p), law, 0.0)
        law /= law.sum()
    return law


def invert(law: Law, uniform: float) -> int:
    """Return the token that a uniform number in [0, 1) selects: the first whose cumulative probability exceeds it."""
    token = int(np.searchsorted(np.cumsum(law), uniform, side="right"))
    return min(token, int(np.flatnonzero(law)[-1]))


def race(law: Law, exponentials: Law) -> int:
    """Return the token with the smallest exponential / probability: each wins with exactly its probability.

    Two races over the same exponentials pick the same token whenever their laws agree enough, which is what the coupled
    mode lives from.

    Source: Daliri et al. 2024 (coupling by shared Gumbel noise); -log(exponential) is a Gumbel variable.
    """
    with np.errstate(divide="ignore"):
        return int(np.argmin(np.where(law > 0, exponentials / law, np.inf)))
