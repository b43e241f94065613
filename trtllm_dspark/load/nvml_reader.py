"""Samples of one device through NVML."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

from trtllm_dspark.load._nvml_calls import NvmlFailure, ask, call, import_pynvml
from trtllm_dspark.load._nvml_events import XidEvents
from trtllm_dspark.load._nvml_processes import read_others
from trtllm_dspark.load.sample import Failure, Sample

T = TypeVar("T")


class NvmlReader:
    """Open a device when first read, read it, and open it again after a failure.

    Args:
        device: NVML's index, as nvidia-smi numbers devices, or the UUID of a GPU or of a MIG device.
        own_pids: processes that count as ours; None = this one.
        own_memory_bytes: returns the device memory those processes allocated; needed in containers that number
            processes differently from the driver.
        clock: monotonic seconds, the samples' `time_s`.
    """

    def __init__(
        self,
        device: int | str = 0,
        *,
        own_pids: Iterable[int] | None = None,
        own_memory_bytes: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = device
        self._own_pids = frozenset((os.getpid(),) if own_pids is None else own_pids)
        self._own_memory_bytes = own_memory_bytes
        self._clock = clock
        self._opened: _OpenDevice | None = None
        self._generation = 1
        self._last_failure: Failure | None = None

    def read(self) -> Sample:
        """Return a sample; a failure of the library is one too, never an exception."""
        try:
            if self._opened is None:
                self._opened = _OpenDevice(import_pynvml(), self.device)
                # After a moment's trouble it is the same device still; after these it may have been reset.
                self._generation += self._last_failure in ("gpu_lost", "no_driver", "no_gpu")
                self._last_failure = None
            values = self._opened.read()
            others = (
                read_others(self._opened.pynvml, self._opened.handle, self._own_pids, self._own_memory_bytes)
                if values["mig"] != "parent"
                else None
            )
        except NvmlFailure as error:
            self.close()
            # The gravest failure since the last reading counts.
            if self._last_failure in (None, "unreadable"):
                self._last_failure = error.failure
            return Sample(self._clock(), failure=error.failure, message=str(error), generation=self._generation)
        if others is not None:
            values["others_memory_bytes"] = others.memory_bytes
            values["others_sm_utilization"] = others.sm_utilization
            values["num_others"] = others.num
        return Sample(self._clock(), generation=self._generation, **values)

    def close(self) -> None:
        """Let go of the library; a later read opens it again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


class _OpenDevice:
    """An initialised library and the handles of one device.

    Raises:
        NvmlFailure: the library, the driver or the device is not there.
    """

    def __init__(self, pynvml: Any, device: int | str) -> None:
        self.pynvml = pynvml
        call(pynvml, "nvmlInit")
        try:
            self.handle = _handle(pynvml, device)
            self.mig, self.board = _board(pynvml, self.handle)
            self.events = XidEvents(pynvml, self.board)
        except NvmlFailure:
            self._shutdown()
            raise

    def read(self) -> dict[str, Any]:
        """Return the fields of a sample, except those about others."""
        nv = self.pynvml
        # Memory first: it exists everywhere, so a lost device shows here.
        memory = self._ask("nvmlDeviceGetMemoryInfo", self.handle, then=lambda info: (info.total, info.free))
        whole = self.mig == "parent"
        use = self._ask("nvmlDeviceGetUtilizationRates", self.handle, then=lambda rates: (rates.gpu, rates.memory))
        return {
            "mig": self.mig,
            "memory_total_bytes": None if memory is None or whole else int(memory[0]),
            "memory_free_bytes": None if memory is None or whole else int(memory[1]),
            "sm_utilization": None if use is None else use[0] / 100,
            "memory_utilization": None if use is None else use[1] / 100,
            "sm_clock_mhz": self._board("nvmlDeviceGetClockInfo", nv.NVML_CLOCK_SM, then=int),
            "sm_clock_max_mhz": self._board("nvmlDeviceGetMaxClockInfo", nv.NVML_CLOCK_SM, then=int),
            "power_watts": self._board("nvmlDeviceGetPowerUsage", then=_watts),
            "power_limit_watts": self._board("nvmlDeviceGetEnforcedPowerLimit", then=_watts),
            "temperature_celsius": self._board("nvmlDeviceGetTemperature", nv.NVML_TEMPERATURE_GPU, then=int),
            "temperature_slowdown_celsius": self._board(
                "nvmlDeviceGetTemperatureThreshold", nv.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, then=int
            ),
            "throttle_reasons": self._throttle_reasons(),
            "ecc_corrected": self._ecc(nv.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            "ecc_uncorrected": self._ecc(nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            "xids": self.events.drain(),
        }

    def close(self) -> None:
        """Free events and library."""
        with contextlib.suppress(NvmlFailure):
            self.events.close()
        self._shutdown()

    def _ask(self, function: str, *args: object, then: Callable[[Any], T]) -> T | None:
        return ask(self.pynvml, function, *args, then=then)

    def _board(self, function: str, *args: object, then: Callable[[Any], T]) -> T | None:
        """Ask the whole GPU: a MIG instance has no clock, power or temperature of its own."""
        return self._ask(function, self.board, *args, then=then)

    def _throttle_reasons(self) -> int | None:
        reasons = self._board("nvmlDeviceGetCurrentClocksEventReasons", then=int)
        if reasons is None:  # drivers before 535 know it under its former name only
            reasons = self._board("nvmlDeviceGetCurrentClocksThrottleReasons", then=int)
        return reasons

    def _ecc(self, kind: int) -> int | None:
        return self._board("nvmlDeviceGetTotalEccErrors", kind, self.pynvml.NVML_VOLATILE_ECC, then=int)

    def _shutdown(self) -> None:
        with contextlib.suppress(NvmlFailure):
            call(self.pynvml, "nvmlShutdown")


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


def _handle(pynvml: Any, device: int | str) -> Any:
    function = "nvmlDeviceGetHandleByIndex" if isinstance(device, int) else "nvmlDeviceGetHandleByUUID"
    key = device if isinstance(device, int) else device.encode()
    handle = ask(pynvml, function, key, then=lambda found: found)
    if handle is None:
        raise NvmlFailure("no_gpu", f"device {device}")
    return handle


def _board(pynvml: Any, handle: Any) -> tuple[Literal["off", "instance", "parent"], Any]:
    """Return how MIG concerns the device, and the handle of the whole GPU."""
    if ask(pynvml, "nvmlDeviceIsMigDeviceHandle", handle, then=lambda answer: bool(answer.value)):
        return "instance", call(pynvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    enabled = ask(pynvml, "nvmlDeviceGetMigMode", handle, then=lambda modes: modes[0] == 1)
    return ("parent" if enabled else "off"), handle
