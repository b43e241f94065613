"""ONNX Runtime: padded view by two gathers, grouped attention over the cache's used part, caches updated in place.

Query heads that share a KV head are stacked as rows of one matrix product, G * S of them, so a pass of one token takes
the same arithmetic path as one of many: logits do not depend on how tokens are split into passes. For the same reason
the used part is a multiple of 64 tokens, whatever lies in it behind a row's last position must be finite, and with one
query head a KV head (G = 1) a caller never issues S = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.graph._rope import rope_tables
from trtllm_dspark.graph.matrices import WEIGHT_DTYPES
from trtllm_dspark.graph.network import FLOAT_DTYPES, MICROSOFT, Dim, Network
from trtllm_dspark.graph.weights import Weights

CACHE_MULTIPLE = 64
"""Lengths of bound caches are multiples of this many tokens."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """What turns projected heads into queries and cached keys and values: norms, rotation, the cache update."""

    config: ModelConfig
    cosine: str
    sine: str
    positions: str

    @staticmethod
    def build(net: Network, config: ModelConfig, num_positions: int, positions: str) -> _Heads:
        """Store rotary tables of `num_positions` rows; `positions` is the name of the padded positions [R, S]."""
        cosine, sine = rope_tables(config, num_positions)
        return _Heads(config, net.weight("rope.cos", cosine), net.weight("rope.sin", sine), positions)

    def split(self, net: Network, rows: str, counts: list[int]) -> list[str]:
        """View [R, S, heads * D] as one [R, count, S, D] value a count."""
        heads = net.node("Reshape", rows, net.ints(0, 0, sum(counts), self.config.head_dim))
        return net.split(
            "Split", [net.node("Transpose", heads, perm=[0, 2, 1, 3]), net.ints(*counts)], len(counts), axis=1
        )

    def rotate(self, net: Network, weights: Weights, x: str, norm: str) -> str:
        """Norm each head where the model has it, and rotate it to its position."""
        if self.config.qk_norm:
            x = weights.norm(net, x, norm, self.config.head_dim, self.config.rms_norm_eps)
        return net.node("RotaryEmbedding", x, self.cosine, self.sine, self.positions, interleaved=0)

    def store(self, net: Network, kind: str, layer: int, update: str) -> str:
        """Write `update` [R, Hkv, S, D] into the cache in place and return the whole cache."""
        shape: list[Dim] = ["R", self.config.num_kv_heads, "C", self.config.head_dim]
        past = net.input(f"past_{kind}.{layer}", np.float32, shape)
        present = net.node("TensorScatter", past, update, "write_indices", out=f"present_{kind}.{layer}", axis=2)
        return net.output(present, present, np.float32, shape)


@dataclass(frozen=True, slots=True)
class _UsedPart:
    """The part of the caches that attention reads: up to the round's last position, in multiples of 64 tokens."""

    end: str
    slots: str

    @staticmethod
    def build(net: Network, last_position: str) -> _UsedPart:
        """Derive it from the largest position of the pass [] int64."""
        multiple = net.scalar(CACHE_MULTIPLE, np.int64)
        parts = net.node("Div", net.node("Add", last_position, multiple), multiple)
        end = net.node("Mul", parts, multiple)
        slots = net.node("Range", net.scalar(0, np.int64), end, net.scalar(1, np.int64))
        return _UsedPart(net.node("Unsqueeze", end, net.ints(0)), slots)

    def cut(self, net: Network, cache: str) -> str:
        return net.node("Slice", cache, net.ints(0), self.end, net.ints(2))

    def bias(self, net: Network, compare: str, bound: str) -> str:
        """Return 0 where a cached position compares with `bound` [R, 1, S or 1, 1], -inf elsewhere."""
        visible = net.node(compare, self.slots, bound)
        return net.node("Where", visible, net.scalar(0.0), net.scalar(float("-inf")))


@dataclass(frozen=True, slots=True)
class _GroupedAttention:
    """Projections, cache update and attention of one layer.

    `pad` and `pack` are the two gathers of ragged rows; both are None where rows have `block_size` tokens each.
    """

    heads: _Heads
    used: _UsedPart
    bias: str
    block_size: int = 0
    pad: str | None = None
    pack: str | None = None
    width: int | None = None

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> str:
        c, prefix = self.heads.config, f"layers.{layer}"
        counts = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        sizes = [count * c.head_dim for count in counts]
        width = self.width or c.hidden_size
        fused = weights.linear(net, x, [f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"], sizes, width)
        if self.pad is None:
            fused = net.node("Reshape", fused, net.ints(-1, self.block_size, sum(sizes)))
        else:
            fused = net.node("Gather", fused, self.pad, axis=0)
        q, k, v = self.heads.split(net, fused, counts)
        q = self.heads.rotate(net, weights, q, f"{prefix}.q_norm")
        keys = self.heads.store(net, "k", layer, self.heads.rotate(net, weights, k, f"{prefix}.k_norm"))
        values = self.heads.store(net, "v", layer, v)
        keys, values = self.used.cut(net, keys), self.used.cut(net, values)

        q = net.node("Reshape", q, net.ints(0, c.num_kv_heads, -1, c.head_dim))
        scores = net.node("FusedMatMul", q, keys, domain=MICROSOFT, transB=1, alpha=float(c.head_dim**-0.5))
        weighted = net.node("MatMul", net.node("Softmax", net.node("Add", scores, self.bias), axis=-1), values)
        mixed = net.node("Reshape", weighted, net.ints(0, c.num_heads, -1, c.head_dim))
        rows = net.node("Reshape", net.node("Transpose", mixed, perm=[0, 2, 1, 3]), net.ints(-1, sizes[0]))
        return rows if self.pack is None else net.node("Gather", rows, self.pack, axis=0)


@dataclass(frozen=True, slots=True)
class _ContextCache:
    """K and V projections and cache update of one layer."""

    heads: _Heads
    pad: str
    width: int | None = None

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> None:
        c, prefix = self.heads.config, f"layers.{layer}"
        size = c.num_kv_heads * c.head_dim
        width = self.width or c.hidden_size
        fused = weights.linear(net, x, [f"{prefix}.k", f"{prefix}.v"], [size, size], width)
        k, v = self.heads.split(net, net.node("Gather", fused, self.pad, axis=0), [c.num_kv_heads, c.num_kv_heads])
        self.heads.store(net, "k", layer, self.heads.rotate(net, weights, k, f"{prefix}.k_norm"))
        self.heads.store(net, "v", layer, v)


class OrtLowering:
    """Attention for ONNX Runtime's CPU provider."""

    name = "ort"
    dtype = FLOAT_DTYPES["float32"]
    native_heads = False
    index_dtype = np.dtype(np.int64)
    weight_dtypes = WEIGHT_DTYPES

    def check(self, model: onnx.ModelProto, directory: Path) -> None:
        """Accept every graph: ONNX Runtime refuses by itself what it cannot run."""

    def add_norm(self, net: Network, x: str, change: str, scale: str, epsilon: float) -> tuple[str, str]:
        """Append one fused node."""
        outputs = net.split(
            "SkipSimplifiedLayerNormalization", [x, change, scale], 4, domain=MICROSOFT, epsilon=epsilon
        )
        return outputs[3], outputs[0]

    def causal(
        self, net: Network, config: ModelConfig, num_positions: int, width: int | None = None
    ) -> _GroupedAttention:
        """Declare positions [T], pad_index [R, S], pack_index [T], write_indices [R] and build the causal mask.

        Projections read rows of `width` in place of the hidden size.
        """
        net.input("positions", np.int64, ["T"])
        pad = net.input("pad_index", np.int64, ["R", "S"])
        pack = net.input("pack_index", np.int64, ["T"])
        net.input("write_indices", np.int64, ["R"])
        positions = net.node("Gather", "positions", pad, axis=0)
        used = _UsedPart.build(net, net.node("ReduceMax", "positions", keepdims=0))
        bias = used.bias(net, "LessOrEqual", net.node("Unsqueeze", positions, net.ints(1, 3)))
        group = config.num_heads // config.num_kv_heads
        if group > 1:
            bias = net.node("Concat", *[bias] * group, axis=2)
        heads = _Heads.build(net, config, num_positions, positions)
        return _GroupedAttention(heads, used, bias, pad=pad, pack=pack, width=width)

    def block(self, net: Network, config: ModelConfig, num_positions: int, block_size: int) -> _GroupedAttention:
        """Declare write_indices [R] (= the anchor's position) and build the block's mask."""
        start = net.node("Unsqueeze", net.input("write_indices", np.int64, ["R"]), net.ints(1))
        positions = net.node("Add", start, net.constant(np.arange(block_size, dtype=np.int64)))
        end = net.node("Unsqueeze", net.node("Add", start, net.ints(block_size)), net.ints(1, 2))
        used = _UsedPart.build(net, net.node("ReduceMax", positions, keepdims=0))
        bias = used.bias(net, "Less", end)
        return _GroupedAttention(_Heads.build(net, config, num_positions, positions), used, bias, block_size=block_size)

    def context(self, net: Network, config: ModelConfig, num_positions: int, width: int | None = None) -> _ContextCache:
        """Declare positions [T], pad_index [R, S] and write_indices [R]; projections read rows of `width`."""
        net.input("positions", np.int64, ["T"])
        pad = net.input("pad_index", np.int64, ["R", "S"])
        net.input("write_indices", np.int64, ["R"])
        positions = net.node("Gather", "positions", pad, axis=0)
        return _ContextCache(_Heads.build(net, config, num_positions, positions), pad, width)
