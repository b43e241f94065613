"""Where a kernel test runs: on the host through the shim of tests/simt, or on a CUDA device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trtllm_dspark.errors import NativeError
from trtllm_dspark.plugins import KernelLibrary

Array = NDArray[Any]


class Buffer(Protocol):
    """Memory that kernels see at `address`."""

    address: int

    def read(self) -> Array:
        """Return a copy of the contents."""
        ...


class Backend(Protocol):
    """Allocates memory and launches kernels; frees everything in `close`."""

    library: KernelLibrary

    def put(self, array: Array) -> Buffer: ...

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Buffer:
        """Poisoned memory (bytes 0x7f)."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class SimtBuffer:
    """Host memory that ends at a guard page."""

    def __init__(self, library: ctypes.CDLL, shape: Sequence[int], dtype: DTypeLike) -> None:
        self._library = library
        self._bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.address = int(library.simt_allocate(self._bytes))
        flat = (ctypes.c_char * self._bytes).from_address(self.address)
        self.array = np.frombuffer(flat, dtype=dtype).reshape(shape)

    def read(self) -> Array:
        return self.array.copy()

    def free(self) -> None:
        self._library.simt_free(self.address, self._bytes)


class SimtBackend:
    """The kernel sources compiled for the host (`simt.h`)."""

    def __init__(self, path: Path, order: int = 0) -> None:
        self.library = KernelLibrary(path)
        self._simt = ctypes.CDLL(str(path))
        self._simt.simt_allocate.restype = ctypes.c_void_p
        self._simt.simt_allocate.argtypes = [ctypes.c_size_t]
        self._simt.simt_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._buffers: list[SimtBuffer] = []
        self.set_order(order)

    def set_order(self, order: int) -> None:
        """Choose the order of threads and blocks: 0 ascending, 1 descending, else shuffled with this seed."""
        self._simt.simt_set_order(order)

    def put(self, array: Array) -> SimtBuffer:
        buffer = self.empty(array.shape, array.dtype)
        buffer.array[...] = array
        return buffer

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> SimtBuffer:
        self._buffers.append(SimtBuffer(self._simt, shape, dtype))
        return self._buffers[-1]

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.free()
        self._buffers = []


class CudaBuffer:
    """Device memory."""

    def __init__(self, driver: CudaDriver, shape: Sequence[int], dtype: DTypeLike) -> None:
        self._driver, self._shape, self._dtype = driver, tuple(shape), np.dtype(dtype)
        self._bytes = self.size = int(np.prod(shape)) * self._dtype.itemsize
        pointer = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(self._bytes, 16)))
        self.address = pointer.value
        driver.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0x7F), ctypes.c_size_t(self._bytes))

    def write(self, array: Array) -> None:
        host = np.ascontiguousarray(array)
        self._driver.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_void_p(host.ctypes.data),
            ctypes.c_size_t(self._bytes),
        )

    def read(self) -> Array:
        host = np.empty(self._shape, self._dtype)
        self._driver.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(host.ctypes.data),
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(self._bytes),
        )
        return host

    def free(self) -> None:
        self._driver.call("cuMemFree_v2", ctypes.c_uint64(self.address))


class CudaDriver:
    """The few driver calls the tests need, through libcuda alone."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", ctypes.c_uint(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.device = device

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise NativeError(f"{name} failed with CUDA error {code}", op=name, code=code)

    def compute_capability(self) -> tuple[int, int]:
        values = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), self.device)
            values.append(value.value)
        return values[0], values[1]

    @staticmethod
    def is_available() -> bool:
        """Whether this machine has a driver and a device."""
        try:
            CudaDriver()
        except (OSError, NativeError):
            return False
        return True


class CudaBackend:
    """The kernels on device 0."""

    def __init__(self, path: Path) -> None:
        self.driver = CudaDriver()
        self.library = KernelLibrary(path)
        self._buffers: list[CudaBuffer] = []

    def put(self, array: Array) -> CudaBuffer:
        buffer = self.empty(array.shape, array.dtype)
        buffer.write(array)
        return buffer

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> CudaBuffer:
        self._buffers.append(CudaBuffer(self.driver, shape, dtype))
        return self._buffers[-1]

    def fill(self, buffer: CudaBuffer, stream: int) -> None:
        """Overwrite a buffer on a stream (to empty the L2 cache)."""
        address, value, count = ctypes.c_uint64(buffer.address), ctypes.c_ubyte(0), ctypes.c_size_t(buffer.size)
        self.driver.call("cuMemsetD8Async", address, value, count, ctypes.c_void_p(stream))

    def synchronize(self) -> None:
        self.driver.call("cuCtxSynchronize")

    def close(self) -> None:
        self.synchronize()
        for buffer in self._buffers:
            buffer.free()
        self._buffers = []
