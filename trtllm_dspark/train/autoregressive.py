"""Autoregressive drafters in PyTorch, unrolled over their own hidden states as decoding does (training-time test).

Row j of a head pairs the target's feature of token j with token j + 1. A block at anchor n begins with the row of
feature n - 1, sees the rows before it, and feeds its own hidden state back for every further slot.
Sources: Li et al. 2025, EAGLE-3; DeepSeek-AI 2024, DeepSeek-V3, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.train.layers import (
    Blocks,
    Frozen,
    Parameters,
    attention,
    finish_layer,
    key_value,
    linear,
    norm,
    queries_of,
)

Follow = Callable[[int, Tensor], Tensor]
"""(slot, normed hidden rows [S A, d]) -> token [S A] that the next slot continues with."""


def unroll(
    parameters: Parameters, frozen: Frozen, config: DrafterConfig, blocks: Blocks, follow: Follow | None = None
) -> Tensor:
    """Run all slots of all blocks, one after the other.

    Args:
        parameters: canonical name -> tensor.
        frozen: what the target lends.
        config: of the drafter.
        blocks: contexts and blocks; `rows` is not looked at, every slot needs the one before.
        follow: chooses the tokens of further slots; None = those of the sequence.

    Returns:
        [S A gamma, d] hidden rows after the final norm.
    """
    model, eps = config.backbone, config.backbone.rms_norm_eps
    num_sequences, num_blocks, gamma = blocks.input_ids.shape
    context = linear(parameters, "fc", blocks.features) if config.kind == "eagle3" else blocks.features
    _, normed = _inputs(parameters, frozen, config, blocks.following_ids, context)
    keys, values = key_value(parameters, frozen, model, 0, normed, blocks.context_positions)
    keys, values = keys[blocks.context_index], values[blocks.context_index]
    # The newest feature below the anchor belongs to the block's own first row.
    seen = blocks.context_lens - 1
    hidden_keys = torch.arange(blocks.context_index.shape[1]) >= seen[..., None]
    state = context[blocks.context_index.gather(1, seen)].reshape(num_sequences * num_blocks, -1)
    tokens, positions = blocks.input_ids[..., 0].reshape(-1), blocks.anchors.reshape(-1) - 1
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    outputs: list[Tensor] = []
    rows = (num_sequences, num_blocks, 1)
    for slot in range(gamma):
        x, normed = _inputs(parameters, frozen, config, tokens, state)
        key, value = key_value(parameters, frozen, model, 0, normed, positions + slot)
        own_keys.append(key.view(*rows, model.num_kv_heads, model.head_dim))
        own_values.append(value.view(*rows, model.num_kv_heads, model.head_dim))
        queries = queries_of(parameters, frozen, model, 0, normed, positions + slot)
        attended = attention(
            queries.view(*rows, model.num_heads, model.head_dim),
            keys,
            values,
            torch.cat(own_keys, 2),
            torch.cat(own_values, 2),
            hidden_keys,
        )
        state = finish_layer(parameters, model, 0, x, attended)
        outputs.append(norm(state, parameters["norm.weight"], eps))
        if slot + 1 < gamma:
            tokens = follow(slot, outputs[-1]) if follow else blocks.previous_ids[..., slot + 1].reshape(-1)
    return torch.stack(outputs, 1).reshape(num_sequences * num_blocks * gamma, -1)


def _inputs(
    parameters: Parameters, frozen: Frozen, config: DrafterConfig, tokens: Tensor, context: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the residual stream and the input of the attention for pairs of tokens and features."""
    eps = config.backbone.rms_norm_eps
    embedded = norm(frozen.embedding[tokens], parameters["embed_norm.weight"], eps)
    pairs = torch.cat([embedded, norm(context, parameters["hidden_norm.weight"], eps)], -1)
    if config.kind == "eagle3":
        return context, pairs
    joined = linear(parameters, "eh_proj", pairs)
    return joined, norm(joined, parameters["layers.0.attn_norm.weight"], eps)
