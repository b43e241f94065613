"""Parse and lint the fused layers: from the builder's messages, what an inspector would say without a GPU.

A lint that finds nothing does not prove that caches are updated in place; only a GPU shows that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from trtllm_dspark.errors import EngineError
from trtllm_dspark.graph.plugin_nodes import PLUGIN_DOMAIN

_TENSOR = re.compile(r"\{ Name: (?P<name>[^,]*), (?:Location: \w+, )?Dimensions: \[(?P<dims>[^\]]*)\]")
_FIELDS = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<type>.*?), Inputs: ")
ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
PROFILE = re.compile(r" \[profile \d+\]$")
_WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")
# Folded constants, norms that were merged and padding of kernels' own layouts.
_WEIGHT_SLACK = 1.02
_WEIGHT_SLACK_BYTES = 1 << 20
_PLUGIN_UPDATE = "DsparkKvAppend"


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """An output of a fused layer; dynamic extents are -1."""

    name: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer of the plan, with the names of the ONNX nodes it came from."""

    name: str
    kind: str
    outputs: tuple[FusedTensor, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a graph's plan must look like.

    Attributes:
        cache_dims: (positions, head dimension) of its caches.
        scatters: outputs of its cache updates.
        num_attention: its attention nodes that the builder has to fuse.
        weight_bytes: bytes of its weights.
        plugins: names of its plugin nodes; each is one layer of every profile.
    """

    cache_dims: tuple[int, int]
    scatters: frozenset[str]
    num_attention: int
    weight_bytes: int
    plugins: tuple[str, ...] = ()


def expect_of(model: onnx.ModelProto) -> Expectation:
    """Read off a graph of a TensorRT lowering what the lint needs; external data is not read."""
    past = [value for value in model.graph.input if value.name.startswith("past_")]
    dims = [dim.dim_value for dim in past[0].type.tensor_type.shape.dim] if past else [0, 0, 0, 0]
    lengths = [entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "length"]
    nodes = model.graph.node
    updates = [node for node in nodes if node.op_type in ("TensorScatter", _PLUGIN_UPDATE)]
    return Expectation(
        cache_dims=(dims[2], dims[3]),
        scatters=frozenset(name for node in updates for name in node.output),
        num_attention=sum(node.op_type == "TRT_Attention" for node in nodes),
        weight_bytes=sum(map(int, lengths)),
        plugins=tuple(node.name for node in nodes if node.domain == PLUGIN_DOMAIN),
    )


def parse_layers(messages: Sequence[str]) -> tuple[FusedLayer, ...]:
    """Parse the builder's verbose messages.

    Raises:
        EngineError: they hold no layer list, or one of another form.
    """
    lists = [message for message in messages if message.startswith("Layers:")]
    if not lists:
        raise EngineError(
            "the builder printed no layer list, so its fusions cannot be checked; use the tensorrt_rtx version that "
            "docs/tensorrt.md names"
        )
    found = []
    for line in "\n".join(lists).split("\nI/O Tensors:")[0].splitlines():
        if line.startswith("Name: "):
            found.append(_parse_line(line))
    if not found:
        raise EngineError(
            "the builder's layer list is empty or of another form; use the version docs/tensorrt.md names"
        )
    return tuple(found)


def _parse_line(line: str) -> FusedLayer:
    fields = _FIELDS.match(line)
    if fields is None or ", Outputs: [" not in line:
        raise EngineError(f"a layer of the builder's list cannot be read ({line[:80]}); use another version")
    tail = line.rsplit(", Outputs: [", 1)[1]
    outputs = tuple(
        FusedTensor(PROFILE.sub("", match["name"]), tuple(int(dim) for dim in match["dims"].split(",") if dim.strip()))
        for match in _TENSOR.finditer(tail)
    )
    return FusedLayer(fields["name"], fields["type"], outputs, tuple(ONNX_NODE.findall(tail)))


def weight_bytes(messages: Sequence[str]) -> int:
    """Return the weights of the plan in bytes, as the builder says.

    Raises:
        EngineError: it does not say.
    """
    found = [int(match[1]) for message in messages if (match := _WEIGHTS.search(message))]
    if not found:
        raise EngineError("the builder printed no size of the weights; use the version docs/tensorrt.md names")
    return max(found)


def lint_layers(
    layers: Sequence[FusedLayer], expected: Expectation, *, num_profiles: int, found_weight_bytes: int
) -> None:
    """Fail where the builder gave up a fusion the engine's speed rests on.

    Args:
        layers: the plan's layers.
        expected: of the graph.
        num_profiles: profiles of the plan; each has its own layers.
        found_weight_bytes: weights of the plan.

    Raises:
        EngineError: a cache copy, missing fused attention, or weights held twice.
    """
    fused = sum("_mha" in layer.name for layer in layers)
    wanted = expected.num_attention * num_profiles
    if fused != wanted:
        raise EngineError(
            f"{fused} of {wanted} attention layers are fused kernels; this head size or GPU architecture has none, "
            "change --dtype or --gpu_architecture"
        )
    for layer in layers:
        for tensor in layer.outputs:
            if _cache_shaped(tensor, expected) and not _is_update(layer, tensor, expected):
                raise EngineError(
                    f"layer {layer.name!r} writes {tensor.name!r} of shape {list(tensor.dims)}, a copy of a whole "
                    "cache each pass; the builder gave up in-place attention, use the version docs/tensorrt.md names"
                )
    wanted = len(expected.plugins) * num_profiles
    plugins = sum(layer.kind.startswith("PluginV3") for layer in layers)
    if plugins != wanted:
        raise EngineError(
            f"the plan has {plugins} plugin layers, its graph calls for {wanted}; the builder dropped or merged some, "
            "use the version docs/tensorrt.md names"
        )
    if found_weight_bytes > expected.weight_bytes * _WEIGHT_SLACK + _WEIGHT_SLACK_BYTES:
        raise EngineError(
            f"the plan holds {found_weight_bytes / 1e6:.1f} MB of weights, its graph "
            f"{expected.weight_bytes / 1e6:.1f}; the builder duplicated a matrix, use the version "
            "docs/tensorrt.md names"
        )


def _cache_shaped(tensor: FusedTensor, expected: Expectation) -> bool:
    """Tell whether a tensor spans all positions and the head dimension, in any order or split."""
    length, width = expected.cache_dims
    if not length:
        return False
    dims = list(tensor.dims)
    if length in dims:
        dims.remove(length)
        return width in dims
    return False


def _is_update(layer: FusedLayer, tensor: FusedTensor, expected: Expectation) -> bool:
    if tensor.name not in expected.scatters:
        return False
    return tensor.name in layer.nodes or layer.kind.startswith("PluginV3")
