"""TensorRT without plugins: the padded view, TensorRT's own fused attention, caches updated in place.

Every choice here avoids something TensorRT's parser or builder gets wrong silently:

* ONNX Attention's `nonpad_kv_seqlen` is dropped by the parser, its mask form makes the builder transpose and repeat the
  whole cache each step, its scale is multiplied into the whole K cache. `TRT_Attention` with per-row lengths does none
  of that, provided that the scale is folded into the query projection (into `q_norm` where the model has one) and the
  rotated queries are a network output. Whether a build kept to that is for the layer list to show.
* A cache is a network input of static length, scattered on axis 2 in linear mode, its successor a network output.
* Rotary tables have the activations' type.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.graph._rope import rope_tables
from trtllm_dspark.graph.checker import check_tensorrt
from trtllm_dspark.graph.lowering._tensorrt import DtypeName, TensorRtLowering
from trtllm_dspark.graph.network import Dim, Network
from trtllm_dspark.graph.weights import Weights

TENSORRT = "trt"
"""Domain of operators that TensorRT's parser defines itself."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """Projections of one kind of head to the padded view [R, h, S, D], and the cache update."""

    config: ModelConfig
    cosine: str
    sine: str
    positions: str
    cache_length: int
    block_size: int = 0
    pad: str | None = None

    @staticmethod
    def build(
        net: Network, config: ModelConfig, num_positions: int, positions: str, cache_length: int, **view: Any
    ) -> _Heads:
        """Store rotary tables in the graph's type; `view` is `pad` (ragged rows) or `block_size` (equal rows)."""
        cosine, sine = (net.weight(f"rope.{n}", t.astype(net.dtype)) for n, t in _tables(config, num_positions))
        return _Heads(config, cosine, sine, positions, cache_length, **view)

    def project(
        self, net: Network, weights: Weights, layer: int, kind: str, count: int, x: str, factor: float = 1.0
    ) -> str:
        """Append one projection of packed rows and its padded view."""
        c = self.config
        rows = weights.linear(net, x, [f"layers.{layer}.{kind}"], [count * c.head_dim], c.hidden_size, factor=factor)
        if self.pad is not None:
            padded = net.node("Gather", rows, self.pad, axis=0)
        else:
            padded = net.node("Reshape", rows, net.ints(-1, self.block_size, count * c.head_dim))
        heads = net.node("Reshape", padded, net.ints(0, 0, count, c.head_dim))
        return net.node("Transpose", heads, perm=[0, 2, 1, 3])

    def rotate(self, net: Network, weights: Weights, x: str, norm: str, factor: float = 1.0, out: str = "") -> str:
        """Norm each head where the model has it, with weights times `factor`, and rotate it to its position."""
        if self.config.qk_norm:
            x = weights.norm(net, x, norm, self.config.head_dim, self.config.rms_norm_eps, factor)
        return net.node("RotaryEmbedding", x, self.cosine, self.sine, self.positions, out=out or None, interleaved=0)

    def store(self, net: Network, kind: str, layer: int, update: str) -> str:
        """Write `update` [R, Hkv, S, D] into the cache in place and return the whole cache."""
        shape: list[Dim] = ["R", self.config.num_kv_heads, self.cache_length, self.config.head_dim]
        past = net.input(f"past_{kind}.{layer}", net.dtype, shape)
        present = net.node(
            "TensorScatter", past, update, "write_indices", out=f"present_{kind}.{layer}", axis=2, mode="linear"
        )
        return net.output(present, present, net.dtype, shape)

    def keys_values(self, net: Network, weights: Weights, layer: int, x: str) -> tuple[str, str]:
        """Append K and V projections and the cache updates; returns both caches."""
        count = self.config.num_kv_heads
        k = self.project(net, weights, layer, "k", count, x)
        k = self.rotate(net, weights, k, f"layers.{layer}.k_norm")
        v = self.project(net, weights, layer, "v", count, x)
        return self.store(net, "k", layer, k), self.store(net, "v", layer, v)


def _tables(config: ModelConfig, num_positions: int) -> list[tuple[str, np.ndarray[Any, Any]]]:
    cosine, sine = rope_tables(config, num_positions)
    return [("cos", cosine), ("sin", sine)]


@dataclass(frozen=True, slots=True)
class _NativeAttention:
    """Attention of one layer; rows see `lengths` [R] cached tokens, the last S of them causally or all of them."""

    heads: _Heads
    lengths: str
    causal_kind: str
    pack: str | None

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> str:
        c, scale = self.heads.config, float(self.heads.config.head_dim**-0.5)
        in_norm = scale if c.qk_norm else 1.0
        q = self.heads.project(net, weights, layer, "q", c.num_heads, x, factor=1.0 if c.qk_norm else scale)
        q = self.heads.rotate(net, weights, q, f"layers.{layer}.q_norm", in_norm, out=f"query.{layer}")
        # Without this output the builder transposes and repeats the caches to fuse what comes before the queries.
        net.output(q, q, net.dtype, ["R", c.num_heads, "S" if self.pack else self.heads.block_size, c.head_dim])
        keys, values = self.heads.keys_values(net, weights, layer, x)
        inputs = (q, keys, values, "", "", self.lengths)
        mixed = net.node("TRT_Attention", *inputs, domain=TENSORRT, causal_kind=self.causal_kind)
        mixed = net.node("Transpose", mixed, perm=[0, 2, 1, 3])
        rows = net.node("Reshape", mixed, net.ints(-1, c.num_heads * c.head_dim))
        return rows if self.pack is None else net.node("Gather", rows, self.pack, axis=0)


@dataclass(frozen=True, slots=True)
class _NativeContext:
    heads: _Heads

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> None:
        self.heads.keys_values(net, weights, layer, x)


@dataclass(frozen=True, slots=True)
class TrtNativeLowering(TensorRtLowering):
    """Attention for TensorRT and TensorRT-RTX, no plugin needed.

    Attributes:
        cache_length: C, static: tokens of a slot, at least max_seq_len plus the widest row.
        dtype_name: what the graph computes in: `float16`, `bfloat16`, or `float32` for comparisons only (TensorRT has
            no fused attention for it).
        native_heads: put a greedy draft chain and the confidence head into the block graph (`graph/native_heads.py`),
            for engines that run without this project's kernels.
    """

    cache_length: int
    dtype_name: DtypeName = "bfloat16"
    native_heads: bool = False
    name = "trt_native"
    index_dtype = np.dtype(np.int64)

    def check(self, model: onnx.ModelProto, directory: Path) -> None:
        """Refuse what TensorRT's parser drops silently."""
        check_tensorrt(model, directory, comparison=self.dtype_name == "float32")

    def causal(self, net: Network, config: ModelConfig, num_positions: int) -> _NativeAttention:
        """Declare positions [T], pad_index [R, S], pack_index [T], write_indices [R]."""
        positions, pad = _padded_positions(net)
        pack = net.input("pack_index", np.int64, ["T"])
        width = net.node("Shape", pad, start=1, end=2)
        lengths = net.node("Add", net.input("write_indices", np.int64, ["R"]), width)
        heads = _Heads.build(net, config, num_positions, positions, self.cache_length, pad=pad)
        return _NativeAttention(heads, lengths, "lower_right", pack)

    def block(self, net: Network, config: ModelConfig, num_positions: int, block_size: int) -> _NativeAttention:
        """Declare write_indices [R] (= the anchor's position)."""
        start = net.input("write_indices", np.int64, ["R"])
        offsets = net.constant(np.arange(block_size, dtype=np.int64))
        positions = net.node("Add", net.node("Unsqueeze", start, net.ints(1)), offsets)
        lengths = net.node("Add", start, net.ints(block_size))
        heads = _Heads.build(net, config, num_positions, positions, self.cache_length, block_size=block_size)
        return _NativeAttention(heads, lengths, "none", None)

    def context(self, net: Network, config: ModelConfig, num_positions: int) -> _NativeContext:
        """Declare positions [T], pad_index [R, S] and write_indices [R]."""
        positions, pad = _padded_positions(net)
        net.input("write_indices", np.int64, ["R"])
        return _NativeContext(_Heads.build(net, config, num_positions, positions, self.cache_length, pad=pad))


def _padded_positions(net: Network) -> tuple[str, str]:
    """Declare positions [T] and pad_index [R, S]; returns the padded positions and pad_index."""
    net.input("positions", np.int64, ["T"])
    pad = net.input("pad_index", np.int64, ["R", "S"])
    return net.node("Gather", "positions", pad, axis=0), pad
