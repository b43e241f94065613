"""Refuse what TensorRT's ONNX parser drops or miscompiles without an error.

The parser accepts constructs it then ignores, and the numbers are wrong. This check runs on every graph meant for it,
before it is written. Facts: TensorRT-RTX 1.7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx

from trtllm_dspark.errors import EngineError

_CAUSAL_KINDS = ("lower_right", "none")
_ATTENTION_LENGTHS = 5
_ATTENTION_MASK = 3


def check_tensorrt(model: onnx.ModelProto) -> None:
    """Check a graph for TensorRT without plugins.

    Raises:
        EngineError: the graph holds a construct TensorRT drops, refuses or copies caches for; all of them are named.
    """
    problems = list(_problems(model))
    if problems:
        raise EngineError(f"the graph {model.graph.name!r} is not safe for TensorRT: {'; '.join(problems)}")


def _problems(model: onnx.ModelProto) -> Iterator[str]:
    graph = model.graph
    inputs = {value.name: value for value in graph.input}
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        if node.domain not in ("", "ai.onnx"):
            if node.domain == "trt" and node.op_type == "TRT_Attention":
                yield from _native_attention(node, outputs)
            else:
                yield f"{node.name} is a {node.domain}::{node.op_type}, which needs a plugin"
        elif node.op_type == "Attention":
            yield from _onnx_attention(node)
        elif node.op_type == "TensorScatter":
            yield from _scatter(node, inputs, outputs)
        elif node.op_type == "RotaryEmbedding":
            yield from _rotary(node, graph)
        elif node.op_type == "CumProd":
            yield f"{node.name} is a CumProd, which has no importer; multiply step by step"
    scattered = Counter(node.input[0] for node in graph.node if node.op_type == "TensorScatter")
    yield from (f"cache {name} is updated {count} times in one pass" for name, count in scattered.items() if count > 1)


def _attributes(node: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}


def _onnx_attention(node: onnx.NodeProto) -> Iterator[str]:
    """ONNX Attention is never safe; the reason says which of its forms this one is."""
    attributes = set(_attributes(node))
    windows = sorted(name for name in attributes if name.endswith("window_size"))
    if len(node.input) > 6 and node.input[6]:
        yield f"{node.name} has nonpad_kv_seqlen, which the parser drops silently; use TRT_Attention with kv_lengths"
    elif windows:
        yield f"{node.name} has {windows[0]}, which the parser drops silently; use a mask"
    elif any(node.input[4:6]) or len(node.output) > 1:
        yield f"{node.name} manages its own cache, which the parser refuses; use TensorScatter"
    else:
        yield f"{node.name} is an ONNX Attention, for which the builder copies the whole cache; use TRT_Attention"


def _native_attention(node: onnx.NodeProto, outputs: set[str]) -> Iterator[str]:
    attributes = _attributes(node)
    kind = attributes["causal_kind"].s.decode() if "causal_kind" in attributes else "missing"
    if kind not in _CAUSAL_KINDS:
        yield f"{node.name} has causal_kind {kind}, expected one of {', '.join(_CAUSAL_KINDS)}"
    if len(node.input) <= _ATTENTION_LENGTHS or not node.input[_ATTENTION_LENGTHS]:
        yield f"{node.name} has no kv_lengths and would read the whole cache"
    elif node.input[_ATTENTION_MASK]:
        yield f"{node.name} has a mask beside its lengths; fold one into the other"
    if set(attributes) - {"causal_kind"}:
        yield f"{node.name} has attributes {sorted(set(attributes) - {'causal_kind'})}; fold the scale into the queries"
    if node.input[0] not in outputs:
        yield f"{node.name} reads queries {node.input[0]!r} that are no output; the builder would copy the caches"


def _scatter(node: onnx.NodeProto, inputs: dict[str, onnx.ValueInfoProto], outputs: set[str]) -> Iterator[str]:
    attributes = _attributes(node)
    if "mode" in attributes and attributes["mode"].s != b"linear":
        yield f"{node.name} scatters in mode {attributes['mode'].s.decode()}, TensorRT has linear only"
    axis = attributes["axis"].i if "axis" in attributes else -2
    if axis not in (2, -2):
        yield f"{node.name} scatters on axis {axis}, TensorRT has axis 2 of four only"
    cache = inputs.get(node.input[0])
    if cache is None:
        yield f"{node.name} updates {node.input[0]!r}, which is no graph input and cannot be in place"
    else:
        shape = cache.type.tensor_type.shape.dim
        if len(shape) != 4 or shape[2].dim_value == 0:
            yield f"cache {cache.name} needs four dimensions and a static length"
    if node.output[0] not in outputs:
        yield f"{node.name} produces {node.output[0]!r}, which is no graph output and cannot be in place"


def _rotary(node: onnx.NodeProto, graph: onnx.GraphProto) -> Iterator[str]:
    tables = {tensor.name: tensor.data_type for tensor in graph.initializer}
    found = {tables[name] for name in node.input[1:3] if name in tables}
    caches = {v.type.tensor_type.elem_type for v in graph.input if v.name.startswith("past_")}
    if found - caches:
        yield f"{node.name} has tables of another type than its activations"
