"""An engine directory with TensorRT plans -> an engine on this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trtllm_dspark.engine._heads import load_heads
from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.tensorrt._cuda import CudaDevice
from trtllm_dspark.engine.tensorrt._model import BLOCK, CONTEXT, TARGET
from trtllm_dspark.engine.tensorrt.device import Device
from trtllm_dspark.engine.tensorrt.engine import TensorRtEngine
from trtllm_dspark.engine_dir import EngineDirectory
from trtllm_dspark.errors import EngineError
from trtllm_dspark.graph import HEADS_FILE, read_heads

BACKENDS = ("tensorrt", "tensorrt_rtx")
NATIVE = "trt_native"


def load_tensorrt(
    directory: EngineDirectory,
    limits: EngineLimits,
    *,
    kernel_library: Path | None = None,
    open_device: Callable[[str, Path | None], Device] = CudaDevice,
) -> TensorRtEngine:
    """Load the plans of an engine directory for the GPU of this machine.

    Args:
        directory: opened and checked.
        limits: of its manifest.
        kernel_library: `libtrtllm_dspark_kernels.so`; None = rounds are decided on the host, one at a time.
        open_device: (backend, kernel library) -> device.

    Raises:
        EngineError: the plans are of another lowering or GPU, hold no weights or are for weight streaming.
        DeviceError: no GPU, or a package that its use needs is missing.
    """
    manifest = directory.manifest
    _check(directory)
    device = open_device(manifest.backend, kernel_library)
    try:
        if device.architecture not in manifest.gpu_architectures:
            raise EngineError(
                f"{directory.path} holds plans for {', '.join(manifest.gpu_architectures)}, this GPU is {device.name} "
                f"({device.architecture}); build with --gpu_architecture {device.architecture}"
            )
        drafter = manifest.drafter_config
        names = (TARGET,) if drafter is None else (TARGET, CONTEXT, BLOCK)
        plans = {name: device.load_plan(directory.file(f"{name}.{device.architecture}.plan")) for name in names}
        heads = tensors = None
        if drafter is not None:
            heads = load_heads(directory.file(HEADS_FILE), drafter, manifest.target_config.vocab_size)
            tensors = read_heads(directory.file(HEADS_FILE))
        return TensorRtEngine(device, plans, manifest.target_config, drafter, limits, heads=heads, head_tensors=tensors)
    except BaseException:
        device.close()
        raise


def _check(directory: EngineDirectory) -> None:
    build = directory.manifest.gpu
    if build is None or build.lowering != NATIVE:
        lowering = "an older version" if build is None else f"the {build.lowering} lowering"
        raise EngineError(
            f"{directory.path} was built by {lowering}, this runtime runs plans of {NATIVE}; build the engine again "
            "with --dspark_plugin disable"
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
