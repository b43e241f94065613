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
        # The product of two float32 is exact in float64.
        product = embeddings[:, column].astype(np.float64) * float(weight[column])
        lanes[:, column % _LANES] = (product + lanes[:, column % _LANES]).astype(np.float32)
    width = _LANES // 2
    while width:
        lanes[:, :width] += lanes[:, width : 2 * width]
        width //= 2
    return np.ascontiguousarray(lanes[:, 0])
