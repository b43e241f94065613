"""Compile one graph into a plan with TensorRT-RTX's builder, which needs no GPU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from trtllm_dspark.build.tensorrt_rtx.layers import (
    FusedLayer,
    expect_of,
    lint_layers,
    parse_layers,
    weight_bytes,
)
from trtllm_dspark.build.tensorrt_rtx.profiles import Profile
from trtllm_dspark.errors import ConfigError, DeviceError, EngineError
from trtllm_dspark.graph.checker import check_tensorrt

_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A plan on disk and what its builder said of it; sizes in bytes."""

    path: Path
    size: int
    weight_bytes: int
    activation_bytes: int
    layers: tuple[FusedLayer, ...]
    seconds: float


def import_tensorrt_rtx() -> Any:
    """Return the module.

    Raises:
        DeviceError: it is not installed or cannot be loaded.
    """
    try:
        import tensorrt_rtx
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"--backend tensorrt_rtx needs TensorRT-RTX ({error}); install trtllm-dspark[tensorrt-rtx]"
        ) from error
    return tensorrt_rtx


def compile_plan(
    graph: Path,
    plan: Path,
    profiles: Sequence[Profile],
    architecture: str,
    progress: Callable[[float], None] | None = None,
) -> CompiledPlan:
    """Check a graph, compile it for one architecture, lint the result and write the plan.

    The builder can put several architectures into a plan, but prints one layer list then: the others go unchecked.

    Args:
        graph: the .onnx file of the `trt_native` lowering, its data file beside it.
        plan: file to write.
        profiles: shape ranges, in the order the engine selects them.
        architecture: such as sm89.
        progress: called with the finished fraction, 0 to 1.

    Raises:
        EngineError: the graph holds what the parser drops, the builder refuses it, or the lint does.
        ConfigError: this builder does not know the architecture.
        DeviceError: the builder is not installed.
    """
    start = time.monotonic()
    model = onnx.load(graph, load_external_data=False)
    check_tensorrt(model)
    serialized, messages = run_builder(graph, model, profiles, architecture, progress)
    layers = parse_layers(messages)
    found = weight_bytes(messages)
    lint_layers(layers, expect_of(model), num_profiles=len(profiles), found_weight_bytes=found)
    plan.write_bytes(serialized)
    if plan.stat().st_size != serialized.nbytes:
        raise DeviceError(f"{plan} has {plan.stat().st_size} bytes after writing {serialized.nbytes}; build again")
    activations = [int(match[1]) for message in messages if (match := _ACTIVATIONS.search(message))]
    seconds = time.monotonic() - start
    return CompiledPlan(plan, serialized.nbytes, found, max(activations, default=0), layers, seconds)


def run_builder(
    graph: Path,
    model: onnx.ModelProto,
    profiles: Sequence[Profile],
    architecture: str,
    progress: Callable[[float], None] | None = None,
) -> tuple[Any, list[str]]:
    """Parse and compile a graph without checks of our own.

    Returns:
        The serialized plan and the builder's messages that the lint reads.

    Raises:
        EngineError: parser or builder refuses the graph.
        ConfigError: this builder does not know the architecture, or refuses a profile.
        DeviceError: the builder is not installed.
    """
    trt = import_tensorrt_rtx()
    logger = _make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        reasons = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise EngineError(f"TensorRT-RTX's parser refuses {graph.name}: {reasons}; report this")
    config = _configure(trt, builder, architecture, progress)
    for profile in profiles:
        _add_profile(builder, config, model, profile)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise EngineError(f"TensorRT-RTX cannot compile {graph.name}: {logger.last_error}; change limits or --dtype")
    return serialized, logger.messages


def _make_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps what the lint reads, and the last error for messages."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[str] = []
            self.last_error = "no reason given"

        def log(self, severity: Any, message: str) -> None:
            if int(severity) <= int(trt.ILogger.ERROR):
                self.last_error = message.strip().splitlines()[0]
            if message.startswith(("Layers:", "Total ")):
                self.messages.append(message)

    return Logger()


def _configure(trt: Any, builder: Any, architecture: str, progress: Callable[[float], None] | None) -> Any:
    config = builder.create_builder_config()
    # The layer list is printed at this verbosity only.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    capability = getattr(trt.ComputeCapability, architecture.upper(), None)
    if capability is None:
        raise ConfigError(f"this TensorRT-RTX does not compile for --gpu_architecture {architecture}; use another")
    config.num_compute_capabilities = 1
    config.set_compute_capability(capability, 0)
    if progress is not None:
        config.progress_monitor = _make_monitor(trt, progress)
    return config


def _make_monitor(trt: Any, progress: Callable[[float], None]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Passes on the outermost phase; its steps are all the builder foretells."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._root: tuple[str, int] | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if self._root is None and not parent_phase:
                self._root = phase_name, max(1, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if self._root is not None and phase_name == self._root[0]:
                progress(min(1.0, (step + 1) / self._root[1]))
            return True

        def phase_finish(self, phase_name: str) -> None:
            if self._root is not None and phase_name == self._root[0]:
                self._root = None

    return Monitor()


def _add_profile(builder: Any, config: Any, model: onnx.ModelProto, profile: Profile) -> None:
    shapes = builder.create_optimization_profile()
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        smallest = tuple(1 if dim.dim_param else dim.dim_value for dim in dims)
        largest = tuple(profile.largest(dim.dim_param) if dim.dim_param else dim.dim_value for dim in dims)
        shapes.set_shape(value.name, smallest, largest, largest)
    if config.add_optimization_profile(shapes) < 0:
        raise ConfigError(
            f"TensorRT-RTX refuses the {profile.name} profile; lower --max_batch_size or --max_num_tokens"
        )
