"""Refuse what TensorRT's ONNX parser drops or miscompiles without an error.

The parser accepts constructs it then ignores, and the numbers are wrong; it accepts others for which the builder copies
whole caches each pass or stores a matrix twice. This check runs on every graph meant for it, before it is written, and
again on what is about to be compiled. Facts: TensorRT-RTX 1.7 and the parser of TensorRT 10 and 11.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx

from trtllm_dspark.errors import EngineError
from trtllm_dspark.graph._duplicates import duplicated_weights
from trtllm_dspark.graph._plugin_checks import plugin_problems
from trtllm_dspark.graph.plugin_nodes import PLUGIN_DOMAIN

_CAUSAL_KINDS = ("lower_right", "none")
_ATTENTION_LENGTHS = 5
_ATTENTION_MASK = 3
_UPDATES = ("TensorScatter", "DsparkKvAppend")
_READERS = ("TRT_Attention", "DsparkRaggedAttention")


def check_tensorrt(
    model: onnx.ModelProto, directory: Path | None = None, *, plugins: bool = False, comparison: bool = False
) -> None:
    """Check a graph for TensorRT.

    Args:
        model: the graph; external data is not read.
        directory: of its data files, to compare weights; None leaves that out.
        plugins: whether it may hold nodes of this project's plugin library.
        comparison: accept float32 attention, which no TensorRT compiles, in graphs that only tests run.

    Raises:
        EngineError: the graph holds a construct TensorRT drops, refuses or copies caches for; all of them are named.
    """
    problems = list(_problems(model, plugins, comparison))
    if directory is not None:
        problems += duplicated_weights(model, directory)
    if problems:
        raise EngineError(f"the graph {model.graph.name!r} is not safe for TensorRT: {'; '.join(problems)}")


def _problems(model: onnx.ModelProto, plugins: bool, comparison: bool) -> Iterator[str]:
    graph = model.graph
    inputs = {value.name: value for value in graph.input}
    outputs = {value.name for value in graph.output}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.domain == PLUGIN_DOMAIN and plugins:
            continue
        if node.domain not in ("", "ai.onnx"):
            if node.domain == "trt" and node.op_type == "TRT_Attention":
                yield from _native_attention(node, outputs, makers)
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
    if plugins:
        yield from plugin_problems(graph, comparison=comparison)
    elif not comparison:
        yield from _float32_caches(graph)
    yield from _unread(graph)
    yield from _caches(graph)


def _attributes(node: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}


def _onnx_attention(node: onnx.NodeProto) -> Iterator[str]:
    """ONNX Attention is never safe; the reason says which of its forms this one is."""
    attributes = _attributes(node)
    windows = sorted(name for name in attributes if name.endswith("window_size"))
    refused = sorted({"softcap", "softmax_precision"} & set(attributes))
    causal = "is_causal" in attributes and attributes["is_causal"].i != 0
    if len(node.input) > 6 and node.input[6]:
        yield f"{node.name} has nonpad_kv_seqlen, which the parser drops silently; use TRT_Attention with kv_lengths"
    elif windows:
        yield f"{node.name} has {windows[0]}, which the parser drops silently; use a mask"
    elif any(node.input[4:6]) or len(node.output) > 1:
        yield f"{node.name} manages its own cache, which the parser refuses; use TensorScatter"
    elif refused:
        yield f"{node.name} has {refused[0]}, which the parser refuses; write it out in operators"
    elif causal and len(node.input) > _ATTENTION_MASK and node.input[_ATTENTION_MASK]:
        yield f"{node.name} has a mask and is_causal, which the parser refuses; fold causality into the mask"
    else:
        yield f"{node.name} is an ONNX Attention, for which the builder copies the whole cache; use TRT_Attention"


def _native_attention(node: onnx.NodeProto, outputs: set[str], makers: dict[str, onnx.NodeProto]) -> Iterator[str]:
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
    maker = makers.get(node.input[0])
    if maker is not None and maker.op_type != "RotaryEmbedding":
        yield (
            f"{node.name} reads queries of a {maker.op_type}, not of the RotaryEmbedding; the builder would copy the "
            "caches, fold it into the query projection"
        )


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


def _float32_caches(graph: onnx.GraphProto) -> Iterator[str]:
    single = onnx.TensorProto.FLOAT
    if any(v.name.startswith("past_") and v.type.tensor_type.elem_type == single for v in graph.input):
        yield "its caches are float32, for which TensorRT has no fused attention; use float16 or bfloat16"


def _unread(graph: onnx.GraphProto) -> Iterator[str]:
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for value in graph.input:
        if value.name not in read:
            yield f"no node reads the graph input {value.name!r}, which the parser drops; remove it or use it"


def _caches(graph: onnx.GraphProto) -> Iterator[str]:
    """A cache is written once and in place: its update alone reads the old one, attention alone the new one."""
    written: Counter[str] = Counter()
    updated: set[str] = set()
    for node in graph.node:
        if node.op_type in _UPDATES:
            caches = node.input[:1] if node.op_type == "TensorScatter" else node.input[-2:]
            written.update(caches)
            updated.update(node.output)
    yield from (f"cache {name} is updated {count} times in one pass" for name, count in written.items() if count > 1)
    for node in graph.node:
        for name in node.input:
            if name in written and node.op_type not in _UPDATES:
                yield f"{node.name} reads the cache {name!r} beside its update, which then cannot be in place"
            if name in updated and node.op_type not in _READERS:
                yield f"{node.name} reads the whole updated cache {name!r} each pass; only attention may"
