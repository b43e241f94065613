"""nvidia-ml-py, imported when first needed, and what its errors mean."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from trtllm_dspark.errors import DeviceError
from trtllm_dspark.load.sample import Failure

T = TypeVar("T")

# NVML's numbers, so that a binding too old to have a name for one still works.
# 7: the list of processes outgrew the room made for it.
_CANNOT_TELL = frozenset({2, 3, 4, 6, 7, 13, 21, 25, 26})
_FAILURES: dict[int, Failure] = {
    1: "no_driver",
    9: "no_driver",
    18: "no_driver",
    12: "no_library",
    15: "gpu_lost",
    16: "gpu_lost",
    28: "no_gpu",
}
_TEXTS: dict[Failure, str] = {
    "gpu_lost": "the GPU is lost or needs a reset",
    "no_driver": "the NVIDIA driver is not loaded, or another version was loaded",
    "no_gpu": "the NVIDIA driver knows no such GPU",
    "no_library": "the NVIDIA driver's libnvidia-ml.so.1 is not installed",
    "unreadable": "NVML failed",
}


class NvmlFailure(DeviceError):
    """The library cannot be used, or the device cannot be read.

    Attributes:
        failure: which kind.
    """

    def __init__(self, failure: Failure, detail: str = "") -> None:
        super().__init__(f"{_TEXTS[failure]} ({detail})" if detail else _TEXTS[failure])
        self.failure = failure


def import_pynvml() -> Any:
    """Return the module `pynvml`.

    Raises:
        NvmlFailure: it is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlFailure("no_library", "install nvidia-ml-py to adapt to the GPU's load") from error


def failure_of(error: Any) -> NvmlFailure:
    """Return what an NVMLError means."""
    return NvmlFailure(_FAILURES.get(error.value, "unreadable"), f"NVML says: {error}")


def call(pynvml: Any, function: str, *args: object) -> Any:
    """Call a function of NVML.

    Raises:
        NvmlFailure: any error of the library.
    """
    try:
        return getattr(pynvml, function)(*args)
    except pynvml.NVMLError as error:
        raise failure_of(error) from error


def ask(pynvml: Any, function: str, *args: object, then: Callable[[Any], T]) -> T | None:
    """Call a function of NVML and convert its answer; None where this binding, driver, device or user cannot tell.

    Raises:
        NvmlFailure: the device or the driver failed.
    """
    offered = getattr(pynvml, function, None)
    if offered is None:
        return None
    try:
        return then(offered(*args))
    except pynvml.NVMLError as error:
        if error.value in _CANNOT_TELL:
            return None
        raise failure_of(error) from error
