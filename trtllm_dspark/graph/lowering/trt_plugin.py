"""TensorRT with this project's plugins: no padded view, attention and caches work on packed rows [T].

A cache is [slots, Hkv, C, D]; `page_table` [R, 1] names the slot of each request, so requests never move and a row that
stands for no request has -1 there. `DsparkKvAppend` writes keys and values in place, which needs an engine built with
PreviewFeature::kALIASED_PLUGIN_IO_10_03; `DsparkRaggedAttention` reads what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph._rope import rope_tables
from trtllm_dspark.graph.checker import check_tensorrt
from trtllm_dspark.graph.lowering._tensorrt import DtypeName, TensorRtLowering
from trtllm_dspark.graph.network import Dim, Network
from trtllm_dspark.graph.plugin_nodes import plugin
from trtllm_dspark.graph.weights import Weights

_HEAD_DIMS = (64, 128)
_CACHE_STEP = 64


def plugin_cache_length(max_seq_len: int, block_size: int) -> int:
    """Return the tokens of a slot: a request and the drafter's block behind its last token, rounded up to 64."""
    return -(-(max_seq_len + block_size) // _CACHE_STEP) * _CACHE_STEP


@dataclass(frozen=True, slots=True)
class _Rows:
    """Packed rows of a pass, all int32; `rotary` holds their positions as RotaryEmbedding wants them."""

    token_request: str
    token_position: str
    cu_tokens: str
    page_table: str
    rotary: str

    @staticmethod
    def build(net: Network, token_request: str, token_position: str, cu_tokens: str) -> _Rows:
        page_table = net.input("page_table", np.int32, ["R", 1])
        # Padding rows have position -1, which no table has.
        valid = net.node("Max", token_position, net.scalar(0, np.int32))
        rotary = net.node("Unsqueeze", net.node("Cast", valid, to=onnx.TensorProto.INT64), net.ints(1))
        return _Rows(token_request, token_position, cu_tokens, page_table, rotary)

    @staticmethod
    def ragged(net: Network) -> _Rows:
        """Declare token_request [T], token_position [T], cu_tokens [R+1] and page_table [R, 1]."""
        request = net.input("token_request", np.int32, ["T"])
        position = net.input("token_position", np.int32, ["T"])
        return _Rows.build(net, request, position, net.input("cu_tokens", np.int32, ["R+1"]))

    @staticmethod
    def blocks(net: Network, block_size: int) -> _Rows:
        """Declare positions [R] (of the anchors) and page_table [R, 1]; every request has `block_size` rows."""
        start = net.input("positions", np.int32, ["R"])
        zero, one = net.scalar(0, np.int64), net.scalar(1, np.int64)
        count = net.node("Squeeze", net.node("Shape", start), net.ints(0))
        requests = net.node("Cast", net.node("Range", zero, count, one), to=onnx.TensorProto.INT32)
        ends = net.node("Cast", net.node("Range", zero, net.node("Add", count, one), one), to=onnx.TensorProto.INT32)
        return _Rows.build(
            net,
            _spread(net, requests, np.zeros(block_size, np.int32)),
            _spread(net, start, np.arange(block_size, dtype=np.int32)),
            net.node("Mul", ends, net.scalar(block_size, np.int32)),
        )


def _spread(net: Network, values: str, offsets: np.ndarray[Any, np.dtype[np.int32]]) -> str:
    """Return [R * n]: every one of `values` [R] plus each of the offsets [n]."""
    rows = net.node("Add", net.node("Unsqueeze", values, net.ints(1)), net.constant(offsets))
    return net.node("Reshape", rows, net.ints(-1))


@dataclass(frozen=True, slots=True)
class _Heads:
    """Projections of one network's layers to heads, and their caches."""

    config: ModelConfig
    rows: _Rows
    cosine: str
    sine: str
    cache_shape: tuple[Dim, ...]

    def project(self, net: Network, weights: Weights, layer: int, x: str, kinds: str) -> list[str]:
        """Append one fused projection of packed rows and split it into [T, heads, D] values, one a kind."""
        c, prefix = self.config, f"layers.{layer}"
        counts = [c.num_heads if kind == "q" else c.num_kv_heads for kind in kinds]
        sizes = [count * c.head_dim for count in counts]
        fused = weights.linear(net, x, [f"{prefix}.{kind}" for kind in kinds], sizes, c.hidden_size)
        parts = net.split("Split", [fused, net.ints(*sizes)], len(sizes), axis=1)
        heads = [
            net.node("Reshape", part, net.ints(-1, count, c.head_dim))
            for part, count in zip(parts, counts, strict=True)
        ]
        return [
            head if kind == "v" else self._rotate(net, weights, head, f"{prefix}.{kind}_norm", count)
            for kind, head, count in zip(kinds, heads, counts, strict=True)
        ]

    def _rotate(self, net: Network, weights: Weights, x: str, norm: str, count: int) -> str:
        """Norm each head where the model has it, and rotate it to its position; a row is a batch of one token."""
        c = self.config
        if c.qk_norm:
            x = weights.norm(net, x, norm, c.head_dim, c.rms_norm_eps)
        single = net.node("Reshape", x, net.ints(-1, count, 1, c.head_dim))
        turned = net.node("RotaryEmbedding", single, self.cosine, self.sine, self.rows.rotary, interleaved=0)
        return net.node("Reshape", turned, net.ints(-1, count, c.head_dim))

    def append(self, net: Network, weights: Weights, layer: int, key: str, value: str) -> tuple[str, str]:
        """Write keys and values into the layer's caches in place and return the whole caches."""
        names = [f"{weights.prefix}{kind}.{layer}" for kind in "kv"]
        past = [net.input(f"past_{name}", net.dtype, self.cache_shape) for name in names]
        rows = self.rows
        inputs = {"token_request": rows.token_request, "token_position": rows.token_position}
        inputs |= {"page_table": rows.page_table, "key": key, "value": value}
        inputs |= {"key_cache": past[0], "value_cache": past[1]}
        present = {f"{kind}_cache_out": f"present_{name}" for kind, name in zip(("key", "value"), names, strict=True)}
        for name in plugin(net, "DsparkKvAppend", inputs, outputs=present).values():
            net.output(name, name, net.dtype, self.cache_shape)
        return present["key_cache_out"], present["value_cache_out"]


@dataclass(frozen=True, slots=True)
class _PluginAttention:
    """Attention of one layer: token t sees its request's positions up to its own (causal) or all of them."""

    heads: _Heads
    causal: bool
    kv_split: int

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> str:
        c, rows = self.heads.config, self.heads.rows
        q, k, v = self.heads.project(net, weights, layer, x, "qkv")
        keys, values = self.heads.append(net, weights, layer, k, v)
        inputs = {"query": q, "key_cache": keys, "value_cache": values, "cu_tokens": rows.cu_tokens}
        inputs |= {"token_position": rows.token_position, "page_table": rows.page_table}
        fields = {"scale": c.head_dim**-0.5, "causal": int(self.causal), "kv_split": self.kv_split}
        mixed = plugin(net, "DsparkRaggedAttention", inputs, fields)["output"]
        return net.node("Reshape", mixed, net.ints(-1, c.num_heads * c.head_dim))


@dataclass(frozen=True, slots=True)
class _PluginContext:
    heads: _Heads

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> None:
        k, v = self.heads.project(net, weights, layer, x, "kv")
        self.heads.append(net, weights, layer, k, v)


@dataclass(frozen=True, slots=True)
class TrtPluginLowering(TensorRtLowering):
    """Attention for TensorRT 11 with the plugin library.

    Attributes:
        cache_length: C, tokens of a slot; see `plugin_cache_length`.
        num_slots: slots of every cache, the requests an engine can hold.
        dtype_name: what the graph computes in: `float16`, `bfloat16`, or `float32` for comparisons only (the attention
            plugin refuses it).
        kv_split: positions an attention piece covers, a multiple of 64.
    """

    cache_length: int
    num_slots: int
    dtype_name: DtypeName = "bfloat16"
    kv_split: int = 512
    name = "trt_plugin"
    native_heads = False
    index_dtype = np.dtype(np.int32)

    def check(self, model: onnx.ModelProto, directory: Path) -> None:
        """Refuse what TensorRT's parser drops silently and what a plugin would refuse."""
        check_tensorrt(model, directory, plugins=True, comparison=self.dtype_name == "float32")

    def causal(self, net: Network, config: ModelConfig, num_positions: int) -> _PluginAttention:
        """Declare token_request [T], token_position [T], cu_tokens [R+1] and page_table [R, 1]."""
        heads = self._heads(net, config, num_positions, _Rows.ragged(net))
        return _PluginAttention(heads, True, self.kv_split)

    def block(self, net: Network, config: ModelConfig, num_positions: int, block_size: int) -> _PluginAttention:
        """Declare positions [R] (of the anchors) and page_table [R, 1]."""
        heads = self._heads(net, config, num_positions, _Rows.blocks(net, block_size))
        return _PluginAttention(heads, False, self.kv_split)

    def context(self, net: Network, config: ModelConfig, num_positions: int) -> _PluginContext:
        """Declare token_request [T], token_position [T], cu_tokens [R+1] and page_table [R, 1]."""
        return _PluginContext(self._heads(net, config, num_positions, _Rows.ragged(net)))

    def _heads(self, net: Network, config: ModelConfig, num_positions: int, rows: _Rows) -> _Heads:
        if config.head_dim not in _HEAD_DIMS and self.dtype_name != "float32":
            raise ConfigError(
                f"the attention plugin has head dimensions {' and '.join(map(str, _HEAD_DIMS))}, this model has "
                f"{config.head_dim}; build with the trt_native lowering"
            )
        cosine, sine = (
            net.shared_weight(f"rope.{name}", table.astype(net.dtype))
            for name, table in zip(("cos", "sin"), rope_tables(config, num_positions), strict=True)
        )
        shape = (self.num_slots, config.num_kv_heads, self.cache_length, config.head_dim)
        return _Heads(config, rows, cosine, sine, shape)
