"""Target and drafter forward passes of one request, without any cache trickery: the oracle of the graph tests.

Everything is computed in `dtype` (float64 unless asked otherwise) from the canonical arrays of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.reference._layers import Array, Arrays, KeyValue, decoder_layer, key_value, linear, rms_norm, weight

__all__ = ["BlockForward", "KeyValue", "TargetForward", "drafter_block", "drafter_context", "target_forward"]


class TargetForward(NamedTuple):
    """Result of the target over a whole sequence.

    Attributes:
        logits: [S, V]; row i predicts token i + 1.
        features: [S, m * d]: outputs of the asked layers, concatenated in the order asked; width 0 if none.
    """

    logits: Array
    features: Array


class BlockForward(NamedTuple):
    """Result of the drafter's backbone over one block.

    Attributes:
        base_logits: [gamma, Vd]; slot j predicts draft token j + 1.
        hidden: [gamma, d] after the final norm: what the LM head and the confidence head read.
    """

    base_logits: Array
    hidden: Array


def target_forward(
    config: ModelConfig,
    arrays: Arrays,
    token_ids: Sequence[int] | NDArray[np.int64],
    *,
    feature_layer_ids: Sequence[int] = (),
    dtype: Any = np.float64,
) -> TargetForward:
    """Run a llama or qwen3 target over one sequence from position 0, causally, with no cache.

    Args:
        config: the target.
        arrays: canonical names -> arrays.
        token_ids: [S] token ids, S >= 1.
        feature_layer_ids: decoder layers whose outputs (before the final norm) are returned; -1 is the embedding.
        dtype: floating-point type of the whole computation.

    Returns:
        Logits of every position and the features.
    """
    ids = np.asarray(token_ids, np.int64)
    positions = np.arange(len(ids))
    causal = positions[:, None] >= positions[None, :]
    outputs = [weight(arrays, "embed.weight", dtype)[ids]]
    for layer in range(config.num_layers):
        outputs.append(decoder_layer(config, arrays, layer, outputs[-1], positions, causal))
    head = "lm_head.weight" if "lm_head.weight" in arrays else "embed.weight"
    logits = rms_norm(arrays, "norm", outputs[-1], config.rms_norm_eps) @ weight(arrays, head, dtype).T
    chosen = [outputs[layer + 1] for layer in feature_layer_ids]
    features = np.concatenate(chosen, axis=1) if chosen else np.empty((len(ids), 0), dtype)
    return TargetForward(logits, features)


def drafter_context(
    config: DrafterConfig, arrays: Arrays, features: Array, *, first_position: int = 0, dtype: Any = np.float64
) -> list[KeyValue]:
    """Project target features of committed tokens to the drafter's context keys and values.

    H_ctx = RMSNorm(W_c features); every layer then takes K = W_K H_ctx (k_norm, RoPE) and V = W_V H_ctx. The layer's
    input norm is *not* applied: it belongs to the block's path.

    Args:
        config: the drafter.
        arrays: canonical names -> arrays.
        features: [C, m * d_target], consecutive positions from `first_position`.
        first_position: position of row 0.
        dtype: floating-point type of the whole computation.

    Returns:
        One KeyValue a layer, each [C, num_kv_heads, head_dim].

    Source: DSpark paper, section 3.1 (context injection).
    """
    backbone = config.backbone
    context = rms_norm(arrays, "hidden_norm", linear(arrays, "fc", np.asarray(features, dtype)), backbone.rms_norm_eps)
    positions = np.arange(first_position, first_position + len(context))
    return [key_value(backbone, arrays, layer, context, positions) for layer in range(backbone.num_layers)]


def drafter_block(
    config: DrafterConfig,
    arrays: Arrays,
    context: Sequence[KeyValue],
    anchor: int,
    *,
    target_arrays: Arrays | None = None,
    draft_token_ids: NDArray[np.int64] | None = None,
    dtype: Any = np.float64,
) -> BlockForward:
    """Run the drafter's backbone over one anchor-first block of `config.block_size` slots.

    Slot 0 is the anchor at position C (the length of the context), the others are masks; all slots see the whole
    context and each other.

    Args:
        config: the drafter.
        arrays: canonical names -> arrays of the drafter.
        context: result of `drafter_context` over positions 0..C-1.
        anchor: id of the last emitted token, which the target has not cached yet.
        target_arrays: arrays of the target, read for an embedding or LM head that the drafter shares.
        draft_token_ids: [Vd] target ids the head is cut to; None keeps the head's rows.
        dtype: floating-point type of the whole computation.

    Returns:
        Base logits and hidden rows of the gamma slots.

    Source: DSpark paper, section 3.1 (parallel block).
    """
    backbone, gamma = config.backbone, config.block_size
    shared = {} if target_arrays is None else target_arrays
    context_len = len(context[0].keys)
    ids = np.array([anchor] + [config.mask_token_id] * (gamma - 1))
    positions = np.arange(context_len, context_len + gamma)
    everything = np.ones((gamma, context_len + gamma), np.bool_)
    embedding = arrays if "embed.weight" in arrays else shared
    x = weight(embedding, "embed.weight", dtype)[ids]
    for layer in range(backbone.num_layers):
        x = decoder_layer(backbone, arrays, layer, x, positions, everything, context[layer])
    hidden = rms_norm(arrays, "norm", x, backbone.rms_norm_eps)
    head = head_rows(arrays, shared, dtype)
    return BlockForward(hidden @ (head if draft_token_ids is None else head[draft_token_ids]).T, hidden)


def head_rows(arrays: Arrays, shared: Arrays, dtype: Any) -> Array:
    """Return the output head [V, d] of a drafter: its own or the target's."""
    for owner, name in ((arrays, "lm_head.weight"), (shared, "lm_head.weight"), (shared, "embed.weight")):
        if name in owner:
            return weight(owner, name, dtype)
    raise KeyError("lm_head.weight: neither the drafter nor the target has it; pass target_arrays")
