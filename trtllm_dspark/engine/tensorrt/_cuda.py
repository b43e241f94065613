"""`Device` over cuda-python, a TensorRT runtime and the kernel library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.tensorrt._plans import TensorRtRuntime
from trtllm_dspark.engine.tensorrt.device import Plan
from trtllm_dspark.errors import DeviceError, EngineMismatch
from trtllm_dspark.plugins import KernelLibrary

ROUND_OPS = frozenset(
    ("round_begin", "round_caps", "round_rows", "round_ban", "round_commit")
    + ("markov_draft", "confidence_schedule", "ragged_accept")
)
"""Kernels that rounds launch; those of plans with plugins a few of them."""
ROUND_FIELDS = frozenset({("round_caps", "live"), ("confidence_schedule", "live")})
"""Parameters that came after their kernels: an older library lacks them, which only the first round would notice."""


def import_cuda() -> Any:
    """Return cuda-python's runtime module.

    Raises:
        DeviceError: it is not installed.
    """
    try:
        from cuda.bindings import runtime
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"running a TensorRT engine needs cuda-python ({error}); pip install 'cuda-bindings>=13,<14'"
        ) from error
    return runtime


def _load_kernels(path: Path) -> KernelLibrary:
    library = KernelLibrary(path)
    if missing := sorted(ROUND_OPS - set(library.ops)):
        raise EngineMismatch(
            f"{path} has no kernel {missing[0]!r}; build it again with this version's trtllm-dspark build_plugins"
        )
    if older := sorted(op for op, field in ROUND_FIELDS if field not in library.fields(op)):
        raise EngineMismatch(
            f"the kernel {older[0]!r} of {path} is of another version; build it again with this version's "
            "trtllm-dspark build_plugins"
        )
    return library


class CudaDevice:
    """Device `index` of this machine.

    Args:
        backend: `tensorrt` or `tensorrt_rtx`: which runtime reads the plans.
        kernels: `libtrtllm_dspark_kernels.so`, or None: passes run, rounds on the device do not.
        plugins: whether that library is `libtrtllm_dspark_plugins.so`, whose plugins the plans call.
        index: CUDA device number.

    Raises:
        DeviceError: cuda-python, the runtime, its driver or the device is missing.
        EngineMismatch: the kernel library is of another version.
        EngineError: TensorRT finds no creator of a plugin.
    """

    def __init__(self, backend: str, kernels: Path | None = None, plugins: bool = False, *, index: int = 0) -> None:
        self._cuda = import_cuda()
        count = self._call(self._cuda.cudaGetDeviceCount)
        if index >= count:
            raise DeviceError(f"CUDA device {index} does not exist, this machine has {count}; choose another")
        self._call(self._cuda.cudaSetDevice, index)
        properties = self._call(self._cuda.cudaGetDeviceProperties, index)
        self._name = str(properties.name.decode())
        self._capability = (int(properties.major), int(properties.minor))
        self._runtime = TensorRtRuntime(backend, kernels if plugins else None)
        self._kernels = None if kernels is None else _load_kernels(kernels)
        self._memory: set[int] = set()
        self._pinned: dict[int, Any] = {}
        self._streams: list[Any] = []
        self._events: list[Any] = []
        self._graphs: set[int] = set()

    @property
    def name(self) -> str:
        """The GPU's name."""
        return self._name

    @property
    def architecture(self) -> str:
        """Its compute capability, such as sm89."""
        return f"sm{self._capability[0]}{self._capability[1]}"

    @property
    def has_kernels(self) -> bool:
        """Whether there is a kernel library."""
        return self._kernels is not None

    def allocate(self, num_bytes: int) -> int:
        """See `Device`."""
        size = max(num_bytes, 1)
        try:
            address = int(self._call(self._cuda.cudaMalloc, size))
        except DeviceError as error:
            if "out of memory" not in str(error):
                raise
            raise DeviceError(
                f"the device has no room for {size / 1e9:.2f} GB ({error}); build with a smaller --max_batch_size, "
                "--max_seq_len or --max_num_tokens"
            ) from error
        self._memory.add(address)
        self._call(self._cuda.cudaMemset, address, 0, size)
        # On the default stream, for which others do not wait.
        self._call(self._cuda.cudaStreamSynchronize, 0)
        return address

    def free(self, address: int) -> None:
        """See `Device`."""
        self._memory.remove(address)
        self._call(self._cuda.cudaFree, address)

    def allocate_pinned(self, num_bytes: int) -> NDArray[Any]:
        """See `Device`."""
        size = max(num_bytes, 1)
        address = int(self._call(self._cuda.cudaHostAlloc, size, self._cuda.cudaHostAllocDefault))
        array: NDArray[Any] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        array[:] = 0
        self._pinned[address] = array
        return array

    def free_pinned(self, array: NDArray[Any]) -> None:
        """See `Device`."""
        address = array.ctypes.data
        del self._pinned[address]
        self._call(self._cuda.cudaFreeHost, address)

    def create_stream(self) -> int:
        """See `Device`."""
        self._streams.append(self._call(self._cuda.cudaStreamCreateWithFlags, self._cuda.cudaStreamNonBlocking))
        return int(self._streams[-1])

    def create_event(self) -> int:
        """See `Device`."""
        self._events.append(self._call(self._cuda.cudaEventCreateWithFlags, self._cuda.cudaEventDefault))
        return int(self._events[-1])

    def record(self, event: int, stream: int) -> None:
        """See `Device`."""
        self._call(self._cuda.cudaEventRecord, event, stream)

    def synchronize(self, event: int) -> None:
        """See `Device`."""
        self._call(self._cuda.cudaEventSynchronize, event)

    def elapsed_us(self, start: int, end: int) -> float:
        """See `Device`."""
        return 1e3 * float(self._call(self._cuda.cudaEventElapsedTime, start, end))

    def to_device(self, address: int, source: NDArray[Any], stream: int) -> None:
        """See `Device`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call(self._cuda.cudaMemcpyAsync, address, source.ctypes.data, source.nbytes, kind, stream)

    def to_host(self, target: NDArray[Any], address: int, stream: int) -> None:
        """See `Device`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call(self._cuda.cudaMemcpyAsync, target.ctypes.data, address, target.nbytes, kind, stream)

    def copy_rows(self, target: int, source: int, *, pitch: int, width: int, rows: int, stream: int) -> None:
        """See `Device`."""
        if width == 0 or rows == 0:
            return
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call(self._cuda.cudaMemcpy2DAsync, target, pitch, source, pitch, width, rows, kind, stream)

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """See `Device`."""
        self._call(self._cuda.cudaMemsetAsync, address, 0, num_bytes, stream)

    def begin_capture(self, stream: int) -> None:
        """See `Device`."""
        # Other threads of the process (an idle server's) may call CUDA meanwhile.
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call(self._cuda.cudaStreamBeginCapture, stream, mode)

    def end_capture(self, stream: int) -> int:
        """See `Device`."""
        graph = self._call(self._cuda.cudaStreamEndCapture, stream)
        try:
            executable = int(self._call(self._cuda.cudaGraphInstantiate, graph, 0))
        finally:
            self._call(self._cuda.cudaGraphDestroy, graph)
        self._graphs.add(executable)
        return executable

    def launch_graph(self, graph: int, stream: int) -> None:
        """See `Device`."""
        self._call(self._cuda.cudaGraphLaunch, graph, stream)

    def free_graph(self, graph: int) -> None:
        """See `Device`."""
        self._graphs.remove(graph)
        self._call(self._cuda.cudaGraphExecDestroy, graph)

    def load_plan(self, path: Path) -> Plan:
        """See `Device`."""
        return self._runtime.load(path)

    def launch(self, op: str, stream: int, **params: int | float | None) -> None:
        """See `Device`."""
        self._library().launch(op, stream=stream, **params)

    def workspace_bytes(self, op: str, **params: int | float | None) -> int:
        """See `Device`."""
        return self._library().workspace_bytes(op, **params)

    def close(self) -> None:
        """See `Device`."""
        self._call(self._cuda.cudaDeviceSynchronize)
        for graph in list(self._graphs):
            self.free_graph(graph)
        for address in list(self._memory):
            self.free(address)
        for array in list(self._pinned.values()):
            self.free_pinned(array)
        for event in self._events:
            self._call(self._cuda.cudaEventDestroy, event)
        for stream in self._streams:
            self._call(self._cuda.cudaStreamDestroy, stream)
        self._events, self._streams = [], []

    def _library(self) -> KernelLibrary:
        if self._kernels is None:
            raise DeviceError(
                "rounds on the device need the kernel library; build it with trtllm-dspark build_plugins and name it"
            )
        return self._kernels

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a runtime function; return its value, if any."""
        code, *values = function(*arguments)
        if int(code) != 0:
            _, text = self._cuda.cudaGetErrorString(code)
            reason = text.decode() if text else f"error {int(code)}"
            raise DeviceError(f"{function.__name__} failed: {reason}")
        return values[0] if values else None
