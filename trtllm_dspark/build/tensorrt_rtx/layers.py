"""Parse and lint the builder's fused layers: what an engine inspector would say, without a GPU to open the plan.

A lint that finds nothing does not prove that caches are updated in place; only a GPU shows that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from trtllm_dspark.errors import EngineError

_TENSOR = re.compile(r"\{ Name: (?P<name>[^,]*), (?:Location: \w+, )?Dimensions: \[(?P<dims>[^\]]*)\]")
_FIELDS = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<type>.*?), Inputs: ")
_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_PROFILE = re.compile(r" \[profile \d+\]$")
_WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")
# Folded constants, norms that were merged and padding of kernels' own layouts.
_WEIGHT_SLACK = 1.02
_WEIGHT_SLACK_BYTES = 1 << 20


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
        scatters: names of its cache updates.
        num_attention: its attention nodes.
        weight_bytes: bytes of its weights.
    """

    cache_dims: tuple[int, int]
    scatters: frozenset[str]
    num_attention: int
    weight_bytes: int


def expect_of(model: onnx.ModelProto) -> Expectation:
    """Read off a graph of the `trt_native` lowering what the lint needs; external data is not read."""
    past = next(value for value in model.graph.input if value.name.startswith("past_k."))
    dims = past.type.tensor_type.shape.dim
    lengths = [entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "length"]
    return Expectation(
        cache_dims=(dims[2].dim_value, dims[3].dim_value),
        scatters=frozenset(node.output[0] for node in model.graph.node if node.op_type == "TensorScatter"),
        num_attention=sum(node.op_type == "TRT_Attention" for node in model.graph.node),
        weight_bytes=sum(map(int, lengths)),
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
        FusedTensor(_PROFILE.sub("", match["name"]), tuple(int(dim) for dim in match["dims"].split(",") if dim.strip()))
        for match in _TENSOR.finditer(tail)
    )
    return FusedLayer(fields["name"], fields["type"], outputs, tuple(_ONNX_NODE.findall(tail)))


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
    for layer in layers:
        for tensor in layer.outputs:
            if _cache_shaped(tensor, expected) and not _is_update(layer, tensor, expected):
                raise EngineError(
                    f"layer {layer.name!r} writes {tensor.name!r} of shape {list(tensor.dims)}, a copy of a whole "
                    "cache each pass; the builder gave up in-place attention, use the version docs/tensorrt.md names"
                )
    fused = sum("_mha" in layer.name for layer in layers)
    wanted = expected.num_attention * num_profiles
    if fused != wanted:
        raise EngineError(
            f"{fused} of {wanted} attention layers are fused kernels; this head size or GPU architecture has none, "
            "change --dtype or --gpu_architecture"
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
    dims = list(tensor.dims)
    if length in dims:
        dims.remove(length)
        return width in dims
    return False


def _is_update(layer: FusedLayer, tensor: FusedTensor, expected: Expectation) -> bool:
    return tensor.name in expected.scatters and tensor.name in layer.nodes
