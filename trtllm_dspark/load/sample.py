"""One reading of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Why there is no reading. `gpu_lost`: the device fell off the bus or needs a reset; `no_driver`: the driver is not
# loaded, or another version was loaded under us; `no_gpu`: the driver knows no such device; `no_library`: NVML or its
# Python binding is not installed; `unreadable`: any other failure of the library.
Failure = Literal["gpu_lost", "no_driver", "no_gpu", "no_library", "unreadable"]

_GPU_IDLE = 0x1
"""NVML's bit in the clocks event reasons: nothing runs, and clocks fall to the idle state."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What NVML said at one moment; None means that this device, driver or user cannot tell.

    Attributes:
        time_s: monotonic seconds.
        failure: why nothing was read; None for a reading.
        message: one sentence about the failure.
        generation: how many times the device has been opened; grows when it comes back after a loss.
        sm_utilization: share of the last period in which a kernel ran, [0, 1], of all processes.
        memory_utilization: share of the last period in which device memory was read or written, [0, 1].
        memory_total_bytes: size of the device memory, of the instance on a MIG device.
        memory_free_bytes: what could still be allocated of it.
        others_memory_bytes: memory in use by processes that are not ours.
        others_sm_utilization: share of the multiprocessors that processes not ours used, [0, 1].
        num_others: processes not ours that hold memory on the device.
        sm_clock_mhz: clock of the multiprocessors now.
        sm_clock_max_mhz: its maximum.
        power_watts: draw now.
        power_limit_watts: limit in force.
        temperature_celsius: of the GPU.
        temperature_slowdown_celsius: at which the hardware slows down.
        throttle_reasons: NVML's clocks event reasons, a bit set.
        ecc_corrected: corrected memory errors since the driver was loaded.
        ecc_uncorrected: uncorrected ones.
        xids: numbers of the Xid events since the sample before.
        mig: `off`, `instance` (this device is a MIG instance) or `parent` (MIG is on and the whole GPU was named).
    """

    time_s: float
    failure: Failure | None = None
    message: str = ""
    generation: int = 1
    sm_utilization: float | None = None
    memory_utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    others_memory_bytes: int | None = None
    others_sm_utilization: float | None = None
    num_others: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: int | None = None
    temperature_slowdown_celsius: int | None = None
    throttle_reasons: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    xids: tuple[int, ...] = ()
    mig: Literal["off", "instance", "parent"] = "off"

    @property
    def idle(self) -> bool:
        """Whether the GPU says that it lowers its clocks because nothing runs."""
        return bool((self.throttle_reasons or 0) & _GPU_IDLE)
