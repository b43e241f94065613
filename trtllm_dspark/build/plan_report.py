"""The report of a compiled plan: profiles and bindings of its graph, layers and sizes the builder told."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from trtllm_dspark.build.tensorrt.compiler import CompiledPlan, input_ranges
from trtllm_dspark.build.tensorrt.profiles import Profile
from trtllm_dspark.engine_dir import Binding, Layer, PlanReport, ShapeRange


def plan_report(
    compiled: CompiledPlan, model: onnx.ModelProto, architecture: str, profiles: Sequence[Profile]
) -> PlanReport:
    """Return what `inspect` shows of a plan.

    Args:
        compiled: the plan.
        model: its graph.
        architecture: what it was compiled for.
        profiles: its profiles in their order.
    """
    ranges = [
        ShapeRange(profile.name, name, *shapes)
        for profile in profiles
        for name, shapes in input_ranges(model, profile).items()
    ]
    return PlanReport(
        plan=compiled.path.name,
        architecture=architecture,
        weight_bytes=compiled.weight_bytes,
        activation_bytes=compiled.activation_bytes,
        profiles=tuple(ranges),
        bindings=graph_bindings(model),
        layers=tuple(
            Layer(layer.name, layer.kind, tuple(f"{tensor.name} {list(tensor.dims)}" for tensor in layer.outputs))
            for layer in compiled.layers
        ),
    )


def graph_bindings(model: onnx.ModelProto) -> tuple[Binding, ...]:
    """Return a graph's inputs and outputs."""
    return tuple(
        Binding(
            value.name,
            mode,
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
            tuple(dim.dim_param or str(dim.dim_value) for dim in value.type.tensor_type.shape.dim),
        )
        for mode, values in (("input", model.graph.input), ("output", model.graph.output))
        for value in values
    )
