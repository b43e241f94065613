"""`Plan` over TensorRT 11 or TensorRT-RTX: the same Python interface under two module names."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.engine.tensorrt.device import PlanTensor, Shape
from trtllm_dspark.errors import DeviceError, EngineError
from trtllm_dspark.plugins import register_plugins

logger = logging.getLogger(__name__)

EXTRAS = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}
"""Backend (= module) -> what to install."""
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


def import_runtime(backend: str) -> Any:
    """Return the module of a backend.

    Raises:
        DeviceError: it is not installed or cannot be loaded.
    """
    if backend not in EXTRAS:
        raise DeviceError(f"backend {backend!r} has no TensorRT runtime; expected one of {', '.join(EXTRAS)}")
    try:
        return importlib.import_module(backend)
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"the engine needs {backend} ({error}); install it, for example with "
            f"pip install '.[{EXTRAS[backend]}]' in a checkout"
        ) from error


class TensorRtRuntime:
    """Deserializes plans.

    Args:
        backend: `tensorrt` or `tensorrt_rtx`.
        plugins: library of the plugins that plans call, or None.

    Raises:
        DeviceError: the runtime cannot be loaded, or finds no GPU.
        EngineError: the runtime refuses the library or finds no creator of a plugin in it.
    """

    def __init__(self, backend: str, plugins: Path | None = None) -> None:
        self._trt = import_runtime(backend)
        self._backend = backend
        self._logger = _make_logger(self._trt)
        if plugins is not None:
            # A plan names its plugins; their creators must be known before it is read.
            register_plugins(self._trt, plugins, "--kernel_library")
        self._runtime = self._trt.Runtime(self._logger)

    def load(self, path: Path) -> TensorRtPlan:
        """Deserialize a plan.

        Raises:
            EngineError: the runtime refuses it.
        """
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise EngineError(
                f"{self._backend} cannot load {path}: {self._logger.last_error}; build the engine with this version "
                "and for this GPU"
            )
        return TensorRtPlan(self._trt, engine, path.name, self._logger)


class TensorRtPlan:
    """See `device.Plan`."""

    def __init__(self, trt: Any, engine: Any, name: str, trt_logger: Any) -> None:
        self._trt, self._engine, self._name, self._logger = trt, engine, name, trt_logger
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self._tensors = {tensor: self._describe(tensor) for tensor in names}

    @property
    def tensors(self) -> Mapping[str, PlanTensor]:
        """Its inputs and outputs by name."""
        return self._tensors

    @property
    def num_profiles(self) -> int:
        """Shape ranges it was compiled for."""
        return int(self._engine.num_optimization_profiles)

    @property
    def scratch_bytes(self) -> int:
        """Activation memory a context of any profile needs."""
        return int(self._engine.device_memory_size_v2)

    def context(self, profile: int, scratch: int, stream: int) -> TensorRtContext:
        """Return a new context of one profile on caller's scratch memory.

        Raises:
            DeviceError: the runtime refuses.
        """
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            # TensorRT-RTX compiles kernels for new shapes in the background and swaps them in later: a captured graph
            # would keep the slow ones.
            config.dynamic_shapes_kernel_specialization_strategy = (
                self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
            )
        context = self._engine.create_execution_context(config)
        if context is None:
            raise DeviceError(f"no execution context of {self._name}: {self._logger.last_error}")
        if not context.set_optimization_profile_async(profile, stream):
            raise DeviceError(f"{self._name} has no profile {profile}: {self._logger.last_error}")
        context.set_device_memory(scratch, self.scratch_bytes)
        return TensorRtContext(context, self._name, self._tensors, self._logger)

    def close(self) -> None:
        """Release the plan's weights."""
        self._engine = None

    def _describe(self, name: str) -> PlanTensor:
        engine, trt = self._engine, self._trt
        dtype = engine.get_tensor_dtype(name).name
        if dtype not in _DTYPES:
            raise EngineError(f"{self._name} has a tensor {name} of type {dtype}; build the engine again")
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise EngineError(f"{self._name} wants {name} in host memory; build the engine again")
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        ranges: tuple[tuple[Shape, Shape], ...] = ()
        shape = tuple(engine.get_tensor_shape(name))
        if is_input and -1 not in shape:
            ranges = ((shape, shape),) * self.num_profiles
        elif is_input:
            shapes = [engine.get_tensor_profile_shape(name, index) for index in range(self.num_profiles)]
            ranges = tuple((tuple(shape[0]), tuple(shape[2])) for shape in shapes)
        aliased = None if is_input else engine.get_aliased_input_tensor(name) or None
        return PlanTensor(name, is_input, _DTYPES[dtype], shape, ranges, aliased)


class TensorRtContext:
    """See `device.PlanContext`."""

    def __init__(self, context: Any, name: str, tensors: Mapping[str, PlanTensor], trt_logger: Any) -> None:
        self._context, self._name, self._tensors, self._logger = context, name, tensors, trt_logger

    def bind(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Set shapes and addresses.

        Raises:
            DeviceError: the runtime refuses one, or one is left out.
        """
        for name, shape in shapes.items():
            if -1 not in self._tensors[name].shape:
                # Nothing to choose; `Network` has compared it with the shape that is wanted.
                continue
            if not self._context.set_input_shape(name, shape):
                raise DeviceError(f"{self._name} refuses {name} of shape {list(shape)}: {self._logger.last_error}")
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise DeviceError(f"{self._name} refuses an address for {name}: {self._logger.last_error}")
        missing = sorted(self._tensors.keys() - addresses.keys()) or self._context.infer_shapes()
        if missing:
            raise DeviceError(f"{self._name}: {', '.join(missing)} not bound; build the engine again")

    def enqueue(self, stream: int) -> None:
        """Enqueue one pass.

        Raises:
            DeviceError: the runtime refuses it.
        """
        if not self._context.execute_async_v3(stream):
            raise DeviceError(f"a pass of {self._name} failed: {self._logger.last_error}")

    def close(self) -> None:
        """Release the context."""
        self._context = None


def _make_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Passes messages on and keeps the last error."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last_error = "no reason given"

        def log(self, severity: Any, message: str) -> None:
            if int(severity) <= int(trt.ILogger.ERROR):
                self.last_error = (message.strip().splitlines() or ["no reason given"])[0]
                logger.error("%s", self.last_error)
            elif int(severity) == int(trt.ILogger.WARNING):
                logger.warning("%s", message.strip())

    return Logger()
