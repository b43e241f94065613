"""Layers of a TensorRT plan as its engine inspector tells them; needs the GPU the plan was compiled for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from trtllm_dspark.build.tensorrt.layers import ONNX_NODE, PROFILE, FusedLayer, FusedTensor
from trtllm_dspark.errors import EngineError

_DIMS = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class InspectedPlan:
    """What a deserialised plan tells: its layers, bytes of weights and of activations."""

    layers: tuple[FusedLayer, ...]
    weight_bytes: int
    activation_bytes: int


def inspect_plan(trt: Any, logger: Any, serialized: Any, where: str) -> InspectedPlan:
    """Deserialise a plan and read its layers.

    Args:
        trt: the module that built it.
        logger: its logger.
        serialized: the plan.
        where: name of the graph, for messages.

    Raises:
        EngineError: the plan cannot be deserialised, or the inspector's answer has another form.
    """
    engine = trt.Runtime(logger).deserialize_cuda_engine(serialized)
    if engine is None:
        raise EngineError(f"the plan of {where} cannot be read back ({logger.last_error}); build again and report this")
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return InspectedPlan(
        layers=parse_inspector(text),
        weight_bytes=int(engine.get_engine_stat(trt.EngineStat.TOTAL_WEIGHTS_SIZE)),
        activation_bytes=int(engine.device_memory_size_v2),
    )


def parse_inspector(text: str) -> tuple[FusedLayer, ...]:
    """Parse an engine inspector's JSON, written for a plan of profiling verbosity DETAILED.

    Raises:
        EngineError: it has another form.
    """
    try:
        layers = json.loads(text)["Layers"]
        found = tuple(_layer(layer) for layer in layers)
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"the inspector's layers cannot be read ({error!r}); use the TensorRT version docs/tensorrt.md names"
        ) from error
    if not found:
        raise EngineError("the inspector lists no layer; use the TensorRT version docs/tensorrt.md names")
    return found


def _layer(layer: dict[str, Any]) -> FusedLayer:
    outputs = tuple(
        FusedTensor(PROFILE.sub("", tensor["Name"]), _dims(tensor["Dimensions"])) for tensor in layer["Outputs"]
    )
    nodes = tuple(ONNX_NODE.findall(str(layer.get("Metadata", ""))))
    return FusedLayer(str(layer["Name"]), str(layer["LayerType"]), outputs, nodes)


def _dims(value: list[int] | str) -> tuple[int, ...]:
    return tuple(int(dim) for dim in (_DIMS.findall(value) if isinstance(value, str) else value))
