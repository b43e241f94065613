"""The Markov half of the confidence head, folded into one number a token."""

from __future__ import annotations

import numpy as np

from trtllm_dspark.graph._quantize import FloatArray

_LANES = 16


def markov_table(embeddings: FloatArray, weight: FloatArray) -> FloatArray:
    """Return [V] float32: what the token before adds to the confidence logit, w_m . W1[v], in the core's bits.

    The core sums 16 lanes by fused multiply-add, then halves them (docs/core_numerics.md).

    Args:
        embeddings: W1 [V, r] as the chain reads it, int8 factors multiplied by their scales.
        weight: w_m [r].
    """
    lanes = np.zeros((len(embeddings), _LANES), np.float32)
    for column in range(embeddings.shape[1]):
        lanes[:, column % _LANES] = _fma32(embeddings[:, column], np.float32(weight[column]), lanes[:, column % _LANES])
    width = _LANES // 2
    while width:
        lanes[:, :width] += lanes[:, width : 2 * width]
        width //= 2
    return np.ascontiguousarray(lanes[:, 0])


def _fma32(a: FloatArray, b: np.float32, c: FloatArray) -> FloatArray:
    """Return a * b + c rounded once: exact product in float64, sum rounded to odd (docs/core_numerics.md)."""
    product = a.astype(np.float64) * np.float64(b)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & even, np.nextafter(total, towards), total)
    return odd.astype(np.float32)
