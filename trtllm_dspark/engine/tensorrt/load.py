"""An engine directory with TensorRT plans -> an engine on this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trtllm_dspark.engine._heads import load_heads
from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.tensorrt._compiled import CompiledRound
from trtllm_dspark.engine.tensorrt._cuda import CudaDevice
from trtllm_dspark.engine.tensorrt._model import BLOCK, CONTEXT, TARGET
from trtllm_dspark.engine.tensorrt._plugin_model import DRAFTER
from trtllm_dspark.engine.tensorrt.device import Device
from trtllm_dspark.engine.tensorrt.engine import TensorRtEngine
from trtllm_dspark.engine.tensorrt.plugin_engine import TensorRtPluginEngine
from trtllm_dspark.engine_dir import EngineDirectory, GpuBuild
from trtllm_dspark.errors import EngineError
from trtllm_dspark.graph import HEADS_FILE, read_heads
from trtllm_dspark.plugins import check_plugin_library

BACKENDS = ("tensorrt", "tensorrt_rtx")
NATIVE, PLUGIN = "trt_native", "trt_plugin"


def load_tensorrt(
    directory: EngineDirectory,
    limits: EngineLimits,
    *,
    kernel_library: Path | None = None,
    open_device: Callable[[str, Path | None, bool], Device] = CudaDevice,
) -> TensorRtEngine | TensorRtPluginEngine:
    """Load the plans of an engine directory for the GPU of this machine.

    Args:
        directory: opened and checked.
        limits: of its manifest.
        kernel_library: plans with plugins: `libtrtllm_dspark_plugins.so`. Others: `libtrtllm_dspark_kernels.so`, or
            None = rounds are decided on the host, one at a time.
        open_device: (backend, library, whether it holds plugins of the plans) -> device.

    Raises:
        EngineError: the plans are of another GPU or other plugins, hold no weights or are for weight streaming.
        DeviceError: no GPU, or a package that its use needs is missing.
    """
    manifest = directory.manifest
    build = _check(directory)
    with_plugins = build.lowering == PLUGIN
    if with_plugins:
        _check_plugins(directory, build, kernel_library)
    device = open_device(manifest.backend, kernel_library, with_plugins)
    try:
        if device.architecture not in manifest.gpu_architectures:
            raise EngineError(
                f"{directory.path} holds plans for {', '.join(manifest.gpu_architectures)}, this GPU is {device.name} "
                f"({device.architecture}); build with --gpu_architecture {device.architecture}"
            )
        target, drafter = manifest.target_config, manifest.drafter_config
        names = [TARGET]
        if drafter is not None:
            names += [DRAFTER] if with_plugins else [CONTEXT, BLOCK]
        plans = {name: device.load_plan(directory.file(f"{name}.{device.architecture}.plan")) for name in names}
        if with_plugins:
            compiled = CompiledRound(build.schedule or "none", build.acceptance or "none")
            return TensorRtPluginEngine(device, plans, target, drafter, limits, compiled)
        heads = tensors = None
        if drafter is not None:
            heads = load_heads(directory.file(HEADS_FILE), drafter, target.vocab_size)
            tensors = read_heads(directory.file(HEADS_FILE))
        return TensorRtEngine(device, plans, target, drafter, limits, heads=heads, head_tensors=tensors)
    except BaseException:
        device.close()
        raise


def _check(directory: EngineDirectory) -> GpuBuild:
    build = directory.manifest.gpu
    if build is None or build.lowering not in (NATIVE, PLUGIN):
        lowering = "an older version" if build is None else f"the {build.lowering} lowering"
        raise EngineError(
            f"{directory.path} was built by {lowering}, this runtime runs plans of {NATIVE} and {PLUGIN}; build the "
            "engine again"
        )
    if build.strip_plan:
        raise EngineError(
            f"the plans of {directory.path} hold no weights and this runtime does not refit them; build the engine "
            "again without --strip_plan"
        )
    if build.weight_streaming:
        # TensorRT's automatic budget is of the memory that is free when it is asked, which is before the caches are
        # allocated; without a budget nothing is streamed.
        raise EngineError(
            f"the plans of {directory.path} are for weight streaming and this runtime sets no budget for it; build the "
            "engine again without --weight_streaming"
        )
    return build


def _check_plugins(directory: EngineDirectory, build: GpuBuild, library: Path | None) -> None:
    if library is None:
        raise EngineError(
            f"the plans of {directory.path} call plugins; give their library, --kernel_library "
            "DIR/libtrtllm_dspark_plugins.so (trtllm-dspark build_plugins --output_dir DIR makes it)"
        )
    found = check_plugin_library(library, "--kernel_library")
    if build.plugin_contract != found:
        wanted = (build.plugin_contract or "none")[:12]
        raise EngineError(
            f"{directory.path} was built with plugins of another version (contract {wanted}; "
            f"{library} has {found[:12]}); build the engine again with --dspark_plugin_library {library}"
        )
