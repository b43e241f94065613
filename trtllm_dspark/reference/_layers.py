"""Decoder layers in NumPy: RMSNorm, half-split RoPE, grouped attention, SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import ModelConfig, RopeScaling

Array = NDArray[Any]
Arrays = Mapping[str, Array]


class KeyValue(NamedTuple):
    """Keys and values of one layer, both [tokens, num_kv_heads, head_dim]; keys carry k_norm and RoPE."""

    keys: Array
    values: Array


def weight(arrays: Arrays, name: str, dtype: Any) -> Array:
    """Return `arrays[name]` in `dtype`."""
    return np.asarray(arrays[name], dtype)


def linear(arrays: Arrays, name: str, x: Array) -> Array:
    """Return x W^T (+ bias) for `name`.weight [out, in] and x [..., in]."""
    y: Array = x @ weight(arrays, f"{name}.weight", x.dtype).T
    return y + weight(arrays, f"{name}.bias", x.dtype) if f"{name}.bias" in arrays else y


def rms_norm(arrays: Arrays, name: str, x: Array, eps: float) -> Array:
    """Return x / sqrt(mean(x^2) + eps) * `name`.weight over the last axis."""
    scale: Array = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    return x / scale * weight(arrays, f"{name}.weight", x.dtype)


def softmax(x: Array) -> Array:
    """Return the softmax over the last axis; -inf entries get exactly 0."""
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    total: Array = np.sum(e, axis=-1, keepdims=True)
    return np.divide(e, total)


def rope_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """Return the [D / 2] angles a position adds, in radians; float32 because the models were trained with those."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.power(np.float32(config.rope_theta), exponents)).astype(np.float32)
    if config.rope_scaling is None:
        return frequencies
    return np.array([_llama3_frequency(float(f), config.rope_scaling) for f in frequencies], np.float32)


def _llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    wavelength = 2 * math.pi / frequency
    turns = scaling.original_max_position_embeddings / wavelength
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def rotate(config: ModelConfig, x: Array, positions: NDArray[np.int64]) -> Array:
    """Apply RoPE to x [tokens, heads, D]: dimension i pairs with i + D / 2."""
    angles = positions[:, None].astype(x.dtype) * rope_frequencies(config).astype(x.dtype)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def heads_of(config: ModelConfig, arrays: Arrays, layer: int, kind: str, x: Array) -> Array:
    """Project x [tokens, d] to the q, k or v heads of a layer [tokens, heads, D], with q_norm/k_norm where present."""
    # Spelled out: the width of zero rows cannot be inferred, and a drafter's context may be empty.
    count = config.num_heads if kind == "q" else config.num_kv_heads
    heads = linear(arrays, f"layers.{layer}.{kind}", x).reshape(len(x), count, config.head_dim)
    norm = f"layers.{layer}.{kind}_norm"
    return rms_norm(arrays, norm, heads, config.rms_norm_eps) if config.qk_norm and kind != "v" else heads


def key_value(config: ModelConfig, arrays: Arrays, layer: int, x: Array, positions: NDArray[np.int64]) -> KeyValue:
    """Return the layer's keys and values of rows x [tokens, d] at `positions` [tokens]."""
    keys = rotate(config, heads_of(config, arrays, layer, "k", x), positions)
    return KeyValue(keys, heads_of(config, arrays, layer, "v", x))


def attention(queries: Array, cache: KeyValue, visible: NDArray[np.bool_]) -> Array:
    """Attend queries [S, H, D] to cached tokens [C, Hkv, D] where visible [S, C], H / Hkv query heads to a KV head."""
    num_tokens, num_heads, head_dim = queries.shape
    group = num_heads // cache.keys.shape[1]
    mixed = np.empty_like(queries)
    for head in range(num_heads):
        keys, values = cache.keys[:, head // group], cache.values[:, head // group]
        scores = queries[:, head] @ keys.T / queries.dtype.type(math.sqrt(head_dim))
        mixed[:, head] = softmax(np.where(visible, scores, -np.inf)) @ values
    return mixed.reshape(num_tokens, num_heads * head_dim)


def decoder_layer(
    config: ModelConfig,
    arrays: Arrays,
    layer: int,
    x: Array,
    positions: NDArray[np.int64],
    visible: NDArray[np.bool_],
    context: KeyValue | None = None,
) -> Array:
    """Return the output [S, d] of one layer; `visible` [S, C + S] covers the context's tokens, then the rows' own."""
    normed = rms_norm(arrays, f"layers.{layer}.attn_norm", x, config.rms_norm_eps)
    own = key_value(config, arrays, layer, normed, positions)
    if context is not None:
        own = KeyValue(*(np.concatenate([past, new]) for past, new in zip(context, own, strict=True)))
    queries = rotate(config, heads_of(config, arrays, layer, "q", normed), positions)
    x = x + linear(arrays, f"layers.{layer}.o", attention(queries, own, visible))
    return feed_forward(config, arrays, layer, x)


def feed_forward(config: ModelConfig, arrays: Arrays, layer: int, x: Array) -> Array:
    """Return x [S, d] plus what the layer's MLP makes of it."""
    normed = rms_norm(arrays, f"layers.{layer}.mlp_norm", x, config.rms_norm_eps)
    gate, up = (linear(arrays, f"layers.{layer}.{name}", normed) for name in ("gate", "up"))
    return x + linear(arrays, f"layers.{layer}.down", gate / (1 + np.exp(-gate)) * up)
