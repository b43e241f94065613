"""Who else is on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trtllm_dspark.load._nvml_calls import ask

_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
_USE_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Others:
    """Processes that are not ours; None = cannot be told.

    Attributes:
        num: how many hold memory.
        memory_bytes: how much they hold.
        sm_utilization: share of the multiprocessors they used, [0, 1].
    """

    num: int | None = None
    memory_bytes: int | None = None
    sm_utilization: float | None = None


def read_others(
    pynvml: Any, handle: Any, own_pids: frozenset[int], own_memory_bytes: Callable[[], int] | None
) -> Others:
    """Tell others' processes from ours.

    A container numbers its processes differently from the driver, so our own may not be in the list. Then what we
    allocated must be known from elsewhere, or nothing is said: to mistake ourselves for a stranger would be worse.

    Args:
        pynvml: the module.
        handle: the device.
        own_pids: our processes.
        own_memory_bytes: returns the bytes our processes allocated; None = not known.

    Raises:
        NvmlFailure: the device or the driver failed.
    """
    memory = _memory_by_pid(pynvml, handle)
    if memory is None:
        return Others()
    foreign = memory.keys() - own_pids
    seen = len(foreign) < len(memory)
    own = 0 if seen or not memory else None if own_memory_bytes is None else own_memory_bytes()
    if own is None:
        return Others()
    held = [memory[pid] for pid in foreign]
    known = [size for size in held if size is not None]
    total = sum(known) if len(known) == len(held) else None
    hidden = not seen and own > 0
    return Others(
        num=max(0, len(foreign) - hidden),
        memory_bytes=None if total is None else max(0, total - own),
        sm_utilization=None if hidden else _use(pynvml, handle, foreign),
    )


def _memory_by_pid(pynvml: Any, handle: Any) -> dict[int, int | None] | None:
    memory: dict[int, int | None] = {}
    answered = False
    for function in _LISTS:
        listed = ask(pynvml, function, handle, then=list)
        if listed is not None:
            answered = True
            # A process may stand in two lists with the same figure.
            memory |= {int(process.pid): process.usedGpuMemory for process in listed}
    return memory if answered else None


def _use(pynvml: Any, handle: Any, pids: Iterable[int]) -> float | None:
    pids = set(pids)
    if not pids:
        return 0.0
    since_us = int((time.time() - _USE_WINDOW_S) * 1e6)
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except pynvml.NVMLError as error:
        # No sample since then: nobody ran. The binding raises the library's success (0) as an error too.
        if error.value in (0, pynvml.NVML_ERROR_NOT_FOUND):
            return 0.0
        return None
    shares = [[float(sample.smUtil) for sample in samples if sample.pid == pid] for pid in pids]
    return min(1.0, sum(statistics.fmean(share) for share in shares if share) / 100)
