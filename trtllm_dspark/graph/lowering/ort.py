"""ONNX Runtime: padded view by two gathers, grouped attention over the bound cache, caches updated in place.

Query heads that share a KV head are stacked as rows of one matrix product, G * S of them, so a pass of one token takes
the same arithmetic path as one of many: logits do not depend on how tokens are split into passes. The length of the
bound cache must be a multiple of 64 for the same reason, and whatever lies in it behind a row's last position must be
finite. With one query head a KV head (G = 1) a caller never issues S = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.graph._rope import rope_tables
from trtllm_dspark.graph.network import MICROSOFT, Dim, Network
from trtllm_dspark.graph.weights import Weights

CACHE_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class _Rope:
    """Rotary embedding of [R, S, h * D] values at positions [R, S]."""

    cosine: str
    sine: str
    positions: str

    @staticmethod
    def build(net: Network, config: ModelConfig, num_positions: int, positions: str) -> _Rope:
        cosine, sine = rope_tables(config, num_positions)
        return _Rope(net.weight("rope.cos", cosine), net.weight("rope.sin", sine), positions)

    def heads(
        self, net: Network, weights: Weights, x: str, num_heads: int, config: ModelConfig, norm: str | None
    ) -> str:
        """Norm each head where the model has it, rotate, and return [R, h, S, D]."""
        x = net.node("Reshape", x, net.ints(0, 0, num_heads, config.head_dim))
        if norm is not None:
            x = weights.norm(net, x, norm, config.head_dim, config.rms_norm_eps)
        x = net.node("Transpose", x, perm=[0, 2, 1, 3])
        return net.node("RotaryEmbedding", x, self.cosine, self.sine, self.positions, interleaved=0)


def _scatter(net: Network, kind: str, layer: int, config: ModelConfig, update: str) -> str:
    """Write `update` [R, Hkv, S, D] into the cache in place and return the whole cache."""
    shape: list[Dim] = ["R", config.num_kv_heads, "C", config.head_dim]
    past = net.input(f"past_{kind}.{layer}", np.float32, shape)
    present = net.node("TensorScatter", past, update, "write_indices", out=f"present_{kind}.{layer}", axis=2)
    return net.output(present, present, np.float32, shape)


def _cache_slots(net: Network) -> str:
    """Return 0 .. C-1 for the bound length C."""
    length = net.node("Shape", "past_k.0", start=2, end=3)
    zero, one = net.scalar(0, np.int64), net.scalar(1, np.int64)
    return net.node("Range", zero, net.node("Squeeze", length, net.ints(0)), one)


def _bias(net: Network, visible: str) -> str:
    return net.node("Where", visible, net.scalar(0.0), net.scalar(float("-inf")))


@dataclass(frozen=True, slots=True)
class _GroupedAttention:
    """Projections, cache update and attention; `pad` and `pack` are None where rows have equal lengths already."""

    config: ModelConfig
    rope: _Rope
    bias: str
    row_shape: str | None
    pad: str | None
    pack: str | None

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> str:
        c, prefix = self.config, f"layers.{layer}"
        sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        fused = weights.linear(net, x, [f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"], sizes, c.hidden_size)
        if self.pad is not None:
            fused = net.node("Gather", fused, self.pad, axis=0)
        elif self.row_shape is not None:
            fused = net.node("Reshape", fused, self.row_shape)
        q, k, v = net.split("Split", [fused, net.ints(*sizes)], 3, axis=-1)
        q = self.rope.heads(net, weights, q, c.num_heads, c, f"{prefix}.q_norm" if c.qk_norm else None)
        k = self.rope.heads(net, weights, k, c.num_kv_heads, c, f"{prefix}.k_norm" if c.qk_norm else None)
        v = net.node("Reshape", v, net.ints(0, 0, c.num_kv_heads, c.head_dim))
        keys = _scatter(net, "k", layer, c, k)
        values = _scatter(net, "v", layer, c, net.node("Transpose", v, perm=[0, 2, 1, 3]))

        q = net.node("Reshape", q, net.ints(0, c.num_kv_heads, -1, c.head_dim))
        scores = net.node("FusedMatMul", q, keys, domain=MICROSOFT, transB=1, alpha=float(c.head_dim**-0.5))
        weighted = net.node("MatMul", net.node("Softmax", net.node("Add", scores, self.bias), axis=-1), values)
        heads = net.node("Reshape", weighted, net.ints(0, c.num_heads, -1, c.head_dim))
        rows = net.node("Reshape", net.node("Transpose", heads, perm=[0, 2, 1, 3]), net.ints(-1, sizes[0]))
        return rows if self.pack is None else net.node("Gather", rows, self.pack, axis=0)


@dataclass(frozen=True, slots=True)
class _ContextCache:
    config: ModelConfig
    rope: _Rope
    pad: str

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> None:
        c, prefix = self.config, f"layers.{layer}"
        size = c.num_kv_heads * c.head_dim
        fused = weights.linear(net, x, [f"{prefix}.k", f"{prefix}.v"], [size, size], c.hidden_size)
        k, v = net.split("Split", [net.node("Gather", fused, self.pad, axis=0), net.ints(size, size)], 2, axis=-1)
        k = self.rope.heads(net, weights, k, c.num_kv_heads, c, f"{prefix}.k_norm" if c.qk_norm else None)
        v = net.node("Reshape", v, net.ints(0, 0, c.num_kv_heads, c.head_dim))
        _scatter(net, "k", layer, c, k)
        _scatter(net, "v", layer, c, net.node("Transpose", v, perm=[0, 2, 1, 3]))


class OrtLowering:
    """Attention for ONNX Runtime's CPU provider."""

    name = "ort"

    def causal(self, net: Network, config: ModelConfig, num_positions: int) -> _GroupedAttention:
        """Declare positions [T], pad_index [R, S], pack_index [T], write_indices [R] and build the causal mask."""
        net.input("positions", np.int64, ["T"])
        pad = net.input("pad_index", np.int64, ["R", "S"])
        pack = net.input("pack_index", np.int64, ["T"])
        net.input("write_indices", np.int64, ["R"])
        positions = net.node("Gather", "positions", pad, axis=0)
        rope = _Rope.build(net, config, num_positions, positions)
        row = net.node("Unsqueeze", positions, net.ints(1, 3))
        bias = _bias(net, net.node("LessOrEqual", _cache_slots(net), row))
        group = config.num_heads // config.num_kv_heads
        if group > 1:
            bias = net.node("Concat", *[bias] * group, axis=2)
        return _GroupedAttention(config, rope, bias, None, pad, pack)

    def block(self, net: Network, config: ModelConfig, num_positions: int, block_size: int) -> _GroupedAttention:
        """Declare write_indices [R] (= the anchor's position) and build the block's mask."""
        start = net.node("Unsqueeze", net.input("write_indices", np.int64, ["R"]), net.ints(1))
        positions = net.node("Add", start, net.constant(np.arange(block_size, dtype=np.int64)))
        rope = _Rope.build(net, config, num_positions, positions)
        end = net.node("Unsqueeze", net.node("Add", start, net.ints(block_size)), net.ints(1, 2))
        bias = _bias(net, net.node("Less", _cache_slots(net), end))
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        return _GroupedAttention(config, rope, bias, net.ints(-1, block_size, width), None, None)

    def context(self, net: Network, config: ModelConfig, num_positions: int) -> _ContextCache:
        """Declare positions [T], pad_index [R, S] and write_indices [R]."""
        net.input("positions", np.int64, ["T"])
        pad = net.input("pad_index", np.int64, ["R", "S"])
        net.input("write_indices", np.int64, ["R"])
        rope = _Rope.build(net, config, num_positions, net.node("Gather", "positions", pad, axis=0))
        return _ContextCache(config, rope, pad)
