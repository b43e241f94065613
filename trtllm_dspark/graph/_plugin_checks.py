"""Compare the plugin nodes of a graph with the contract of the plugin library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import AttributeProto, TensorProto

from trtllm_dspark.graph.plugin_nodes import PLUGIN_DOMAIN, plugin_specs
from trtllm_dspark.plugins import PluginSpec

_TYPE_NAMES: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.INT8: "int8",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.BOOL: "bool",
}
_FIELD_TYPES = {"int32": AttributeProto.INT, "float32": AttributeProto.FLOAT}
_FIXED = {
    "Shape": "int64",
    "Size": "int64",
    "ArgMax": "int64",
    "ArgMin": "int64",
    "Equal": "bool",
    "Less": "bool",
    "LessOrEqual": "bool",
    "Greater": "bool",
    "GreaterOrEqual": "bool",
}
_TYPED_BY = {"DequantizeLinear": 1, "Where": 1}
_HEAD_DIMS = (64, 128)
_UNTOLD = "untold"
Shapes = Mapping[str, list[int | None]]


def plugin_problems(graph: onnx.GraphProto, *, comparison: bool) -> Iterator[str]:
    """Yield what the plugin library or the parser would refuse, drop or misread.

    Args:
        graph: of a model; external data is not read.
        comparison: accept float32 where a plugin takes half types only.
    """
    dtypes = {value.name: _name_of(value.type.tensor_type.elem_type) for value in graph.input}
    dtypes |= {tensor.name: _name_of(tensor.data_type) for tensor in graph.initializer}
    shapes: dict[str, list[int | None]] = {
        value.name: [dim.dim_value or None for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    shapes |= {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    ends = {value.name for value in graph.input}, {value.name for value in graph.output}
    updated: set[str] = set()
    for node in graph.node:
        if node.domain != PLUGIN_DOMAIN:
            kind = _result_type(node, dtypes)
            dtypes |= dict.fromkeys(node.output, kind)
            continue
        spec = plugin_specs().get(node.op_type)
        # The outputs of a node that fails its checks have no type that others could be compared with.
        dtypes |= dict.fromkeys(node.output, _UNTOLD)
        if spec is None:
            yield f"{node.name} names the plugin {node.op_type}, the library has {', '.join(sorted(plugin_specs()))}"
            continue
        problems = list(_attribute_problems(node, spec))
        yield from problems
        if problems:
            continue
        yield from _tensor_problems(node, spec, dtypes, shapes, comparison)
        yield from _cache_problems(node, ends, updated, shapes, comparison)


def _name_of(code: int) -> str:
    return _TYPE_NAMES.get(code, f"type {code}")


def _result_type(node: onnx.NodeProto, dtypes: Mapping[str, str]) -> str:
    if node.op_type in ("Cast", "ConstantOfShape"):
        for attribute in node.attribute:
            if attribute.name in ("to", "value"):
                return _name_of(attribute.i if attribute.name == "to" else attribute.t.data_type)
    if node.op_type in _FIXED:
        return _FIXED[node.op_type]
    return dtypes.get(node.input[_TYPED_BY.get(node.op_type, 0)], "unknown") if node.input else "unknown"


def _attribute_problems(node: onnx.NodeProto, spec: PluginSpec) -> Iterator[str]:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    for name, wanted in (("plugin_version", spec.version), ("plugin_namespace", spec.namespace)):
        attribute = attributes.pop(name, None)
        found = "none" if attribute is None else attribute.s.decode(errors="replace")
        if found != wanted:
            yield (
                f"{node.name} has {name} {found}, the plugin library has {wanted}; "
                "write the graph with the version that built the library"
            )
    for field in spec.fields:
        attribute = attributes.pop(field.name, None)
        if attribute is None:
            yield f"{node.name} lacks the field {field.name} of {spec.name}; write every field"
        elif attribute.type != _FIELD_TYPES[field.dtype]:
            yield f"{node.name}: field {field.name} must be one {field.dtype}; the plugin refuses other types"
        else:
            value = attribute.i if field.dtype == "int32" else attribute.f
            if not field.low * (1 - 1e-6) <= value <= field.high:
                yield f"{node.name}: field {field.name} is {value}, expected {field.low:g} to {field.high:g}"
    for name in attributes:
        yield f"{node.name} has the attribute {name!r}, which is no field of {spec.name}; the parser drops it silently"


def _fields(node: onnx.NodeProto) -> dict[str, float]:
    kinds = (AttributeProto.INT, AttributeProto.FLOAT)
    return {a.name: a.i if a.type == AttributeProto.INT else a.f for a in node.attribute if a.type in kinds}


def _tensor_problems(
    node: onnx.NodeProto,
    spec: PluginSpec,
    dtypes: dict[str, str],
    shapes: Shapes,
    comparison: bool,
) -> Iterator[str]:
    """Check count, types and known extents; also records the types of the outputs."""
    fields = _fields(node)
    inputs, outputs = spec.inputs(fields), spec.outputs(fields)
    if len(node.input) != len(inputs) or "" in node.input:
        yield f"{node.name} has {len(node.input)} inputs, with its fields it takes {[t.name for t in inputs]}"
        return
    if len(node.output) != len(outputs):
        yield f"{node.name} has {len(node.output)} outputs, with its fields it gives {[t.name for t in outputs]}"
        return
    groups: dict[str, str] = {}
    extents: dict[str, int] = {key: int(value) for key, value in fields.items()}
    for tensor, value in zip((*inputs, *outputs), (*node.input, *node.output), strict=True):
        if value in node.output:
            dtypes[value] = groups.get(tensor.group or "", tensor.dtypes[0])
        found = dtypes.get(value, "unknown")
        if found == _UNTOLD:
            continue
        half = "float16" in tensor.dtypes and comparison and found == "float32"
        if found not in tensor.dtypes and not half:
            yield f"{node.name}: {tensor.name} is {found}, expected {' or '.join(tensor.dtypes)}"
        elif tensor.group is not None and groups.setdefault(tensor.group, found) != found:
            yield f"{node.name}: {tensor.name} is {found}, the tensors it must match are {groups[tensor.group]}"
        shape = shapes.get(value)
        if shape is None:
            continue
        if len(shape) != len(tensor.dims):
            yield f"{node.name}: {tensor.name} has {len(shape)} dimensions, expected {list(tensor.dims)}"
            continue
        for symbol, extent in zip(tensor.dims, shape, strict=True):
            known = int(symbol) if symbol.isdigit() else extents.get(symbol)
            if extent is not None and known is not None and known != extent:
                yield f"{node.name}: {tensor.name} has {symbol} = {extent}, expected {known}"
            elif extent is not None and symbol.isidentifier():
                extents[symbol] = extent


def _cache_problems(
    node: onnx.NodeProto, ends: tuple[set[str], set[str]], updated: set[str], shapes: Shapes, comparison: bool
) -> Iterator[str]:
    inputs, outputs = ends
    if node.op_type == "DsparkKvAppend":
        for name in node.input[-2:]:
            if name not in inputs:
                yield f"{node.name} updates {name!r}, which is no graph input and cannot be in place"
        for name in node.output:
            if name not in outputs:
                yield f"{node.name} produces {name!r}, which is no graph output and cannot be in place"
        updated.update(node.output)
    if node.op_type == "DsparkRaggedAttention":
        for name in node.input[1:3]:
            if name not in updated:
                yield f"{node.name} reads the cache {name!r}, which no DsparkKvAppend has updated in this pass"
        width = (shapes.get(node.input[1]) or [None])[-1]
        if width not in _HEAD_DIMS and not comparison:
            yield f"{node.name} has a head dimension of {width}, the plugin has {' and '.join(map(str, _HEAD_DIMS))}"
