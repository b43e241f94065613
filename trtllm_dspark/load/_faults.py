"""Loss of the device and errors it reports."""

from __future__ import annotations

from trtllm_dspark.load.policy_config import PolicyConfig
from trtllm_dspark.load.sample import Sample
from trtllm_dspark.load.state import Reason

# Xid events after which the device cannot be trusted before a reset: double-bit ECC, page retirement failure, NVLink,
# fallen off the bus, uncontained ECC, GSP timeout and error, unrecovered ECC.
FATAL_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120, 140})


class FaultPolicy:
    """Turn losses, Xid events and ECC counters into closed admission."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._lost_until: float | None = None
        self._fatal_generation: int | None = None
        self._fault_until = 0.0
        self._xid_until = 0.0
        self._uncorrected: int | None = None

    @property
    def lost(self) -> bool:
        """Whether the device was lost and has not been back for long enough."""
        return self._lost_until is not None

    def update(self, sample: Sample) -> set[Reason]:
        """Return the faults in force; `gpu_lost` and `gpu_fault` close admission, `xid` is only told."""
        now = sample.time_s
        if sample.failure == "gpu_lost":
            self._lost_until = float("inf")
        elif sample.failure is None:
            self._read(sample)
        reasons: set[Reason] = set()
        if self._lost_until is not None:
            reasons.add("gpu_lost")
        if self._fatal_generation is not None or now < self._fault_until:
            reasons.add("gpu_fault")
        if now < self._xid_until:
            reasons.add("xid")
        return reasons

    def _read(self, sample: Sample) -> None:
        now, config = sample.time_s, self._config
        if self._lost_until == float("inf"):
            self._lost_until = now + config.release_s
        if self._lost_until is not None and now >= self._lost_until:
            self._lost_until = None
        if self._fatal_generation not in (None, sample.generation):
            self._fatal_generation = None
        if FATAL_XIDS & set(sample.xids):
            self._fatal_generation = sample.generation
        elif sample.xids:
            self._xid_until = now + config.release_s
        if sample.ecc_uncorrected is not None:
            if self._uncorrected is not None and sample.ecc_uncorrected > self._uncorrected:
                self._fault_until = now + config.fault_hold_s
            self._uncorrected = sample.ecc_uncorrected
