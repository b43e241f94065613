"""The GPU of this machine, asked of the CUDA driver without any package."""

from __future__ import annotations

import ctypes
from typing import Any

from trtllm_dspark.build.gpus import Gpu
from trtllm_dspark.errors import DeviceError

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76
_NAME_BYTES = 256


def find_device(driver: str = _DRIVER) -> Gpu:
    """Return the first GPU that CUDA shows this process.

    Args:
        driver: file name of the CUDA driver's library.

    Raises:
        DeviceError: there is no driver, or it finds no GPU.
    """
    try:
        cuda = ctypes.CDLL(driver)
    except OSError as error:
        raise DeviceError(f"{_refusal()} ({error})") from error
    device, total = ctypes.c_int(), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(cuda, "cuInit", 0)
    _call(cuda, "cuDeviceGet", ctypes.byref(device), 0)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    _call(cuda, "cuDeviceGetName", name, _NAME_BYTES, device)
    return Gpu(name.value.decode(errors="replace"), f"sm{major.value}{minor.value}", total.value)


def _call(cuda: ctypes.CDLL, function: str, *arguments: Any) -> None:
    code = getattr(cuda, function)(*arguments)
    if code:
        raise DeviceError(f"{_refusal()} ({function} gives error {code})")


def _refusal() -> str:
    return (
        "--backend tensorrt compiles on the GPU it is for and this machine shows none; build where that GPU is, "
        "or use --backend tensorrt_rtx, which needs none"
    )
