"""The sequential (Markov) and confidence heads in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.reference._layers import Arrays

Array = NDArray[np.float64]
HeadKind = Literal["none", "vanilla", "gated", "rnn"]


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) elementwise."""
    return np.asarray(1 / (1 + np.exp(-x)))


@dataclass(frozen=True)
class Heads:
    """Weights of a drafter's heads; r is the Markov rank, d the drafter's hidden size.

    Attributes:
        kind: which sequential head.
        w1: [V, r], indexed by target ids.
        w2: [Vd, r], indexed by draft ids.
        gate_weight: [r, d + r], columns [h ; W1[x]]; gate_bias: [r] or None.
        rnn_weight: [3r, 2r + d], rows gate, candidate, output, columns [state ; W1[x] ; h]; rnn_bias: [3r] or None.
        confidence_weight: [d] or [d + r], columns [h ; W1[x]].
        confidence_bias: a number, 0 when the head has none.
        d2t: [Vd] target id of each draft id, or None when both vocabularies are the same.
    """

    kind: HeadKind = "none"
    w1: Array | None = None
    w2: Array | None = None
    gate_weight: Array | None = None
    gate_bias: Array | None = None
    rnn_weight: Array | None = None
    rnn_bias: Array | None = None
    confidence_weight: Array | None = None
    confidence_bias: float = 0.0
    d2t: NDArray[np.int64] | None = None

    def target_ids(self, size: int) -> NDArray[np.int64]:
        """Return the target id of each of the `size` draft ids."""
        return np.arange(size) if self.d2t is None else self.d2t


def heads_from_arrays(config: DrafterConfig, arrays: Arrays) -> Heads:
    """Collect a drafter's heads from its canonical arrays; `markov.w2` is cut to `d2t` unless it already is."""

    def read(name: str) -> Array | None:
        return np.asarray(arrays[name], np.float64) if name in arrays else None

    w2, bias, d2t = read("markov.w2.weight"), read("confidence.bias"), arrays.get("d2t")
    if w2 is not None and d2t is not None and len(w2) != len(d2t):
        w2 = w2[d2t]
    return Heads(
        kind=config.markov_head,
        w1=read("markov.w1.weight"),
        w2=w2,
        gate_weight=read("markov.gate.weight"),
        gate_bias=read("markov.gate.bias"),
        rnn_weight=read("markov.rnn.weight"),
        rnn_bias=read("markov.rnn.bias"),
        confidence_weight=read("confidence.weight"),
        confidence_bias=0.0 if bias is None else float(bias[0]),
        d2t=None if d2t is None else np.asarray(d2t, np.int64),
    )


def first_state(heads: Heads) -> Array:
    """Return the sequential head's state before the first draft token: zeros [r]."""
    return np.zeros(0 if heads.w1 is None else heads.w1.shape[1])


def markov_bias(heads: Heads, state: Array, previous: int, hidden: Array | None) -> tuple[Array | float, Array]:
    """Return (B_k [Vd], next state [r]): what the sequential head adds to the base logits of one slot.

    Args:
        heads: weights.
        state: [r] state left by the slot before; only `rnn` changes it.
        previous: target id of the token before, the anchor for the first slot.
        hidden: [d] hidden row h_k of the slot; `gated` and `rnn` read it.

    Source: DSpark paper, section 3.1, equations 4-6; joint projection of the rnn head as in DeepSpec.
    """
    if heads.kind == "none" or heads.w1 is None or heads.w2 is None:
        return 0.0, state
    embedded = heads.w1[previous]
    if heads.kind == "vanilla":
        return heads.w2 @ embedded, state
    if heads.kind == "gated" and heads.gate_weight is not None:
        gate = heads.gate_weight @ np.concatenate([np.asarray(hidden), embedded])
        return heads.w2 @ (sigmoid(gate + (0 if heads.gate_bias is None else heads.gate_bias)) * embedded), state
    if heads.rnn_weight is None:
        raise ValueError(f"the {heads.kind} head has no weight of its own; pass gate_weight or rnn_weight")
    joint = heads.rnn_weight @ np.concatenate([state, embedded, np.asarray(hidden)])
    gate, candidate, output = np.split(joint + (0 if heads.rnn_bias is None else heads.rnn_bias), 3)
    state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
    return heads.w2 @ np.tanh(output), state


def confidence(
    heads: Heads,
    hidden: Array,
    anchor: int,
    draft_tokens: NDArray[np.int64],
    *,
    temperature: Array | float = 1.0,
    bias: Array | float = 0.0,
) -> Array:
    """Return [gamma] c_k: probability that draft token k is accepted given that all before it were.

    c_k reads the token *before* k, never token k itself: that is what lets a schedule that uses c_k stay lossless.

    Args:
        heads: weights; the confidence half must be there.
        hidden: [gamma, d] hidden rows of the block.
        anchor: target id before the first draft token.
        draft_tokens: [gamma] target ids.
        temperature: [gamma] > 0, divides the logit of each position (sequential temperature scaling).
        bias: [gamma], added after the temperature.

    Source: DSpark paper, equation 7 and section 3.2.1.
    """
    weight, size = np.asarray(heads.confidence_weight), hidden.shape[1]
    logit = hidden @ weight[:size] + heads.confidence_bias
    if len(weight) > size and heads.w1 is not None:
        before = np.concatenate([[anchor], draft_tokens[:-1]]).astype(np.int64)
        logit = logit + heads.w1[before] @ weight[size:]
    return sigmoid(logit / temperature + bias)
