"""Sequential and confidence heads, float32 or int8 factors.

Source: docs/core_numerics.md, sections 6 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.reference.bits.float32 import F32, dot16, dot_in_order, sigmoid, tanh
from trtllm_dspark.reference.heads import HeadKind

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Heads:
    """Weights as the core takes them: see `trtllm_dspark._core.DraftHeads`; w1 and w2 may be int8 with row scales."""

    kind: HeadKind = "none"
    w1: NDArray[Any] | None = None
    w2: NDArray[Any] | None = None
    w1_scale: F32 | None = None
    w2_scale: F32 | None = None
    gate_weight: F32 | None = None
    gate_bias: F32 | None = None
    rnn_weight: F32 | None = None
    rnn_bias: F32 | None = None
    confidence_weight: F32 | None = None
    confidence_bias: F32 | None = None
    d2t: Int | None = None

    @property
    def rank(self) -> int:
        """Markov rank r, 0 without a sequential head."""
        return 0 if self.kind == "none" or self.w1 is None else int(self.w1.shape[1])

    def embedded(self, token: int) -> F32:
        """Return W1[token] in binary32."""
        row = np.asarray(self.w1)[token].astype(np.float32)
        return row if self.w1_scale is None else np.asarray(row * self.w1_scale[token])


def corrected_logits(heads: Heads, base_logits: F32, state: F32, previous: int, hidden: F32 | None) -> tuple[F32, F32]:
    """Return (U_k + B_k [Vd], next state [r]) of one slot."""
    if heads.kind == "none":
        return base_logits, state
    w2 = np.asarray(heads.w2)
    if heads.kind == "vanilla" and heads.w1_scale is not None:
        return _add_int8(heads, base_logits, np.asarray(heads.w1)[previous], heads.w1_scale[previous]), state
    latent, state = _latent(heads, state, previous, hidden)
    if heads.w2_scale is not None:
        return _add_int8(heads, base_logits, *_quantise(latent)), state
    return base_logits + dot_in_order(latent, w2), state


def _latent(heads: Heads, state: F32, previous: int, hidden: F32 | None) -> tuple[F32, F32]:
    e, rank = heads.embedded(previous), heads.rank
    if heads.kind == "vanilla":
        return e, state
    h = np.asarray(hidden, np.float32)
    size = len(h)
    if heads.kind == "gated":
        g = np.asarray(heads.gate_weight)
        pre = dot16(g[:, :size], h) + dot16(g[:, size:], e) + _or_zero(heads.gate_bias)
        return sigmoid(pre) * e, state
    n = np.asarray(heads.rnn_weight)
    pre = dot16(n[:, :rank], state) + dot16(n[:, rank : 2 * rank], e) + dot16(n[:, 2 * rank :], h)
    pre = pre + _or_zero(heads.rnn_bias)
    g = sigmoid(pre[:rank])
    state = g * state + (np.float32(1) - g) * tanh(pre[rank : 2 * rank])
    return tanh(pre[2 * rank :]), state


def _or_zero(bias: F32 | None) -> Any:
    return np.float32(0) if bias is None else bias


def _quantise(latent: F32) -> tuple[NDArray[np.int8], np.float32]:
    largest = np.float32(np.abs(latent).max())
    if largest == 0:
        return np.zeros(len(latent), np.int8), np.float32(0)
    return np.rint(latent * (np.float32(127) / largest)).astype(np.int8), largest / np.float32(127)


def _add_int8(heads: Heads, base_logits: F32, latent: NDArray[np.int8], scale: np.float32) -> F32:
    dot = np.asarray(heads.w2).astype(np.int32) @ latent.astype(np.int32)
    return base_logits + dot.astype(np.float32) * (scale * np.asarray(heads.w2_scale))


def confidence(
    heads: Heads,
    hidden: F32,
    anchors: Int,
    draft_tokens: Int,
    *,
    temperature: F32 | None = None,
    bias: F32 | None = None,
) -> F32:
    """Return [R, n] float32 confidences; see `trtllm_dspark._core.confidence`."""
    weight, size = np.asarray(heads.confidence_weight), hidden.shape[2]
    num_requests, num_steps = draft_tokens.shape
    result = np.zeros((num_requests, num_steps), np.float32)
    for r in range(num_requests):
        before = int(anchors[r])
        for k in range(num_steps):
            if draft_tokens[r, k] < 0:
                break
            z = dot16(weight[:size], hidden[r, k])
            if len(weight) > size:
                z = z + dot16(weight[size:], heads.embedded(before))
            z = z + (np.float32(0) if heads.confidence_bias is None else heads.confidence_bias[0])
            inverse = np.float32(1) / (np.float32(1) if temperature is None else temperature[k])
            result[r, k] = sigmoid(z * inverse + (np.float32(0) if bias is None else bias[k]))
            before = int(draft_tokens[r, k])
    return result
