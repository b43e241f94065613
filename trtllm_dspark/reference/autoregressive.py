"""Autoregressive drafters (EAGLE-3-style, MTP-1) of one request in NumPy: the oracle of their graphs.

Row j of a head pairs the target's feature of token j with token j + 1 and predicts token j + 2. Behind the last feature
the head's own hidden state takes the feature's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.reference._layers import (
    Array,
    Arrays,
    KeyValue,
    attention,
    feed_forward,
    heads_of,
    key_value,
    linear,
    rms_norm,
    rotate,
    weight,
)
from trtllm_dspark.reference.models import BlockForward, head_rows


def autoregressive_drafts(
    config: DrafterConfig,
    arrays: Arrays,
    features: Array,
    token_ids: Sequence[int],
    *,
    target_arrays: Arrays,
    draft_token_ids: Array | None = None,
    dtype: Any = np.float64,
) -> BlockForward:
    """Unroll a head behind n features.

    Args:
        config: the drafter.
        arrays: canonical names -> arrays of the drafter.
        features: [n, m * d] target features of the tokens in the cache, n >= 1.
        token_ids: [n - 1 + k] tokens 1, 2, ...: those in the cache, the anchor (token n), and the draft tokens that
            follow it; k drafts are predicted.
        target_arrays: arrays of the target, whose embedding and output head are used.
        draft_token_ids: [Vd] target ids the head is cut to; None keeps all rows.
        dtype: floating-point type of the whole computation.

    Returns:
        Logits and normed hidden rows [k] that predict the tokens behind the anchor.

    Sources: EAGLE-3 (Li et al. 2025), DeepSeek-V3 (2024) section 2.2.
    """
    model, table = config.backbone, weight(target_arrays, "embed.weight", dtype)
    context = np.asarray(features, dtype)
    if config.kind == "eagle3":
        context = linear(arrays, "fc", context)
    known = len(context) - 1
    residual, normed = _inputs(config, arrays, table[list(token_ids[:known])], context[:known])
    cache = key_value(model, arrays, 0, normed, np.arange(known))
    state, outputs = context[known:], []
    for row in range(known, len(token_ids)):
        residual, normed = _inputs(config, arrays, table[[token_ids[row]]], state)
        own = key_value(model, arrays, 0, normed, np.array([row]))
        cache = KeyValue(*(np.concatenate([past, new]) for past, new in zip(cache, own, strict=True)))
        queries = rotate(model, heads_of(model, arrays, 0, "q", normed), np.array([row]))
        state = residual + linear(arrays, "layers.0.o", attention(queries, cache, np.ones((1, row + 1), np.bool_)))
        state = feed_forward(model, arrays, 0, state)
        outputs.append(rms_norm(arrays, "norm", state, model.rms_norm_eps))
    hidden = np.concatenate(outputs)
    head = head_rows({}, target_arrays, dtype)
    return BlockForward(hidden @ (head if draft_token_ids is None else head[draft_token_ids]).T, hidden)


def _inputs(config: DrafterConfig, arrays: Arrays, embedded: Array, context: Array) -> tuple[Array, Array]:
    """Return the residual stream and the input of the attention for pairs of tokens and features."""
    eps = config.backbone.rms_norm_eps
    pairs = np.concatenate(
        [rms_norm(arrays, "embed_norm", embedded, eps), rms_norm(arrays, "hidden_norm", context, eps)], axis=1
    )
    if config.kind == "eagle3":
        return context, pairs
    joined = linear(arrays, "eh_proj", pairs)
    return joined, rms_norm(arrays, "layers.0.attn_norm", joined, eps)
