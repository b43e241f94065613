"""Compile one graph into a plan with TensorRT's or TensorRT-RTX's builder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from trtllm_dspark.build.tensorrt.inspector import InspectedPlan, inspect_plan
from trtllm_dspark.build.tensorrt.layers import FusedLayer, expect_of, lint_layers, parse_layers, weight_bytes
from trtllm_dspark.build.tensorrt.profiles import Profile
from trtllm_dspark.build.tensorrt.toolkit import Toolkit
from trtllm_dspark.errors import ConfigError, DeviceError, EngineError
from trtllm_dspark.graph.checker import check_tensorrt
from trtllm_dspark.plugins import register_plugins

_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")
_FAST_LEVEL = 1
Progress = Callable[[float], None]
"""Called with the finished fraction, 0 to 1."""


@dataclass(frozen=True, slots=True)
class CompilerOptions:
    """How a builder works.

    Attributes:
        plugin_library: the library that holds the graphs' plugins; None for graphs without.
        strip_plan: leave the weights out of the plan.
        weight_streaming: let weights stay in host memory at run time.
        fast_build: compile quicker, to slower kernels.
        timing_cache: kernel timings to start from; None keeps no timings.
    """

    plugin_library: Path | None = None
    strip_plan: bool = False
    weight_streaming: bool = False
    fast_build: bool = False
    timing_cache: bytes | None = None


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A plan on disk and what its builder said of it; sizes in bytes."""

    path: Path
    size: int
    weight_bytes: int
    activation_bytes: int
    layers: tuple[FusedLayer, ...]
    seconds: float
    timing_cache: bytes | None = None


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """What came out of the builder: the plan, the messages the lint reads, the builder's logger and timings."""

    serialized: Any
    messages: list[str]
    logger: Any
    timing_cache: bytes | None = None


@dataclass(frozen=True, slots=True)
class CompilerJob:
    """Arguments of one `compile_plan`, so that it can run in a process of its own."""

    toolkit: Toolkit
    graph: Path
    plan: Path
    profiles: tuple[Profile, ...]
    architecture: str
    options: CompilerOptions

    def run(self, progress: Progress | None = None) -> CompiledPlan:
        """Compile; errors are those of `compile_plan`."""
        return compile_plan(
            self.toolkit, self.graph, self.plan, self.profiles, self.architecture, self.options, progress
        )


def compile_plan(
    toolkit: Toolkit,
    graph: Path,
    plan: Path,
    profiles: Sequence[Profile],
    architecture: str,
    options: CompilerOptions = CompilerOptions(),
    progress: Progress | None = None,
) -> CompiledPlan:
    """Check a graph, compile it for one architecture, lint the result and write the plan.

    A builder can put several architectures into a plan, but prints one layer list then: the others go unchecked.

    Args:
        toolkit: which builder.
        graph: the .onnx file of a TensorRT lowering, its data file beside it.
        plan: file to write.
        profiles: shape ranges, in the order the engine selects them.
        architecture: such as sm89; a toolkit that needs a GPU compiles for the one it finds.
        options: how the builder works.
        progress: called with the finished fraction.

    Raises:
        EngineError: the graph holds what the parser drops, the builder refuses it, or the lint does.
        ConfigError: this builder does not know the architecture, or refuses a profile.
        DeviceError: the builder is not installed, or finds no GPU and needs one.
    """
    start = time.monotonic()
    model = onnx.load(graph, load_external_data=False)
    check_tensorrt(model, graph.parent, plugins=options.plugin_library is not None)
    built = run_builder(toolkit, graph, model, profiles, architecture, options, progress)
    found = _inspected(toolkit, built, graph.name)
    expected = expect_of(model)
    # A stripped plan holds no weights: nothing can be there twice.
    weights = 0 if options.strip_plan else found.weight_bytes
    lint_layers(found.layers, expected, num_profiles=len(profiles), found_weight_bytes=weights)
    size = write_plan(plan, built.serialized)
    return CompiledPlan(
        plan,
        size,
        found.weight_bytes,
        found.activation_bytes,
        found.layers,
        time.monotonic() - start,
        built.timing_cache,
    )


def write_plan(plan: Path, serialized: Any) -> int:
    """Write a plan and return its size.

    Raises:
        DeviceError: the file is not as long as the plan.
    """
    plan.write_bytes(serialized)
    size = plan.stat().st_size
    if size != serialized.nbytes:
        raise DeviceError(f"{plan} has {size} bytes after writing {serialized.nbytes}; check the disk and build again")
    return size


def _inspected(toolkit: Toolkit, built: BuiltPlan, where: str) -> InspectedPlan:
    """Return the plan's layers: a builder without a GPU prints them, a plan on its GPU can be asked."""
    if toolkit.needs_gpu:
        return inspect_plan(toolkit.load(), built.logger, built.serialized, where)
    activations = [int(match[1]) for message in built.messages if (match := _ACTIVATIONS.search(message))]
    return InspectedPlan(parse_layers(built.messages), weight_bytes(built.messages), max(activations, default=0))


def run_builder(
    toolkit: Toolkit,
    graph: Path,
    model: onnx.ModelProto,
    profiles: Sequence[Profile],
    architecture: str,
    options: CompilerOptions = CompilerOptions(),
    progress: Progress | None = None,
) -> BuiltPlan:
    """Parse and compile a graph without checks of our own; arguments and errors as of `compile_plan`."""
    trt = toolkit.load()
    logger = _make_logger(trt)
    try:
        builder = trt.Builder(logger)
    except TypeError as error:
        # What the binding makes of a builder that could not be created.
        raise DeviceError(
            f"{toolkit.product} cannot start ({logger.last_error}); check the driver and that a GPU is free"
        ) from error
    if options.plugin_library is not None:
        register_plugins(trt, options.plugin_library, "--dspark_plugin_library")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        reasons = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise EngineError(f"{toolkit.product}'s parser refuses {graph.name}: {reasons}; report this")
    config = _configure(toolkit, trt, builder, architecture, options)
    if progress is not None:
        config.progress_monitor = _make_monitor(trt, progress)
    for profile in profiles:
        _add_profile(toolkit, builder, config, model, profile)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise EngineError(
            f"{toolkit.product} cannot compile {graph.name}: {logger.last_error}; change limits or --dtype"
        )
    cache = None if options.timing_cache is None else bytes(config.get_timing_cache().serialize())
    return BuiltPlan(serialized, logger.messages, logger, cache)


def merge_timing_caches(toolkit: Toolkit, caches: Sequence[bytes]) -> bytes:
    """Return one cache with the timings of all."""
    trt = toolkit.load()
    config = trt.Builder(_make_logger(trt)).create_builder_config()
    merged = config.create_timing_cache(b"")
    for cache in caches:
        merged.combine(config.create_timing_cache(cache), False)
    return bytes(merged.serialize())


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


def _configure(toolkit: Toolkit, trt: Any, builder: Any, architecture: str, options: CompilerOptions) -> Any:
    config = builder.create_builder_config()
    # The layers are told at this verbosity only.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if not toolkit.needs_gpu:
        capability = getattr(trt.ComputeCapability, architecture.upper(), None)
        if capability is None:
            raise ConfigError(
                f"this {toolkit.product} does not compile for --gpu_architecture {architecture}; use another"
            )
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    if options.plugin_library is not None:
        # Caches are inputs that a plugin updates in place and returns.
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if options.strip_plan:
        # Without a promise to refit with the same weights the builder would have to give up optimisations.
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    if options.weight_streaming:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    if options.fast_build:
        config.builder_optimization_level = _FAST_LEVEL
    if options.timing_cache is not None and not config.set_timing_cache(
        config.create_timing_cache(options.timing_cache), False
    ):
        raise ConfigError(
            "--input_timing_cache is of another GPU or another TensorRT version; leave it out or give this machine's"
        )
    return config


def _make_monitor(trt: Any, progress: Progress) -> Any:
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


def input_ranges(model: onnx.ModelProto, profile: Profile) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the smallest, tuned and largest shape of every graph input in a profile."""
    kinds = (profile.smallest, profile.tuned, profile.largest)
    ranges = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        ranges[value.name] = tuple(
            tuple(extent(dim.dim_param) if dim.dim_param else dim.dim_value for dim in dims) for extent in kinds
        )
    return ranges


def _add_profile(toolkit: Toolkit, builder: Any, config: Any, model: onnx.ModelProto, profile: Profile) -> None:
    shapes = builder.create_optimization_profile()
    for name, (smallest, tuned, largest) in input_ranges(model, profile).items():
        shapes.set_shape(name, smallest, tuned, largest)
    if config.add_optimization_profile(shapes) < 0:
        raise ConfigError(
            f"{toolkit.product} refuses the {profile.name} profile; lower --max_batch_size or --max_num_tokens"
        )
