"""The policy: samples in, `LoadState` out. Pure: no clock, no library, no thread."""

from __future__ import annotations

from trtllm_dspark.load._clocks import ClockPolicy
from trtllm_dspark.load._faults import FaultPolicy
from trtllm_dspark.load._memory import MemoryPolicy
from trtllm_dspark.load._tenants import TenantPolicy
from trtllm_dspark.load.policy_config import PolicyConfig
from trtllm_dspark.load.sample import Sample
from trtllm_dspark.load.state import REASONS, LoadState, Reason


class LoadPolicy:
    """Decide from one sample after the other; docs/load.md is its table.

    Args:
        config: thresholds and times.
        reference_sm_clock_mhz: SM clock the cost table was measured at; None = the device's maximum.
    """

    def __init__(self, config: PolicyConfig | None = None, *, reference_sm_clock_mhz: int | None = None) -> None:
        self.config = config or PolicyConfig()
        self._clocks = ClockPolicy(self.config, reference_sm_clock_mhz)
        self._tenants = TenantPolicy(self.config)
        self._memory = MemoryPolicy(self.config)
        self._faults = FaultPolicy(self.config)
        self._last_read_s: float | None = None
        self._state = LoadState()

    def update(self, sample: Sample) -> LoadState:
        """Take the next sample; return the decision that holds until the one after it."""
        faults = self._faults.update(sample)
        if sample.failure is None:
            self._last_read_s = sample.time_s
            self._state = self._decide(sample, faults)
        elif self._faults.lost or not self._holds(sample.time_s):
            self._forget()
            reasons: set[Reason] = faults if self._faults.lost else faults | {sample.failure}
            self._state = _closed_by(faults, LoadState(), reasons)
        return self._state

    def rebase_memory(self) -> None:
        """Take what is free at the next reading as normal: our own engines' memory has changed."""
        self._memory.reset()

    def _decide(self, sample: Sample, faults: set[Reason]) -> LoadState:
        scale, reasons = self._clocks.update(sample)
        ours, slots = self._tenants.update(sample), self._memory.update(sample)
        if ours < 1:
            reasons.add("co_tenant")
        if slots < 1:
            reasons.add("memory_pressure")
        if sample.mig == "parent":
            reasons.add("mig_parent")
        state = LoadState(available=True, compute_scale=scale, budget_scale=ours, admission_scale=slots)
        return _closed_by(faults, state, reasons | faults)

    def _holds(self, time_s: float) -> bool:
        """Whether the last decision outlives a failure: a short one must not open what was closed."""
        return self._last_read_s is not None and time_s - self._last_read_s < self.config.release_s

    def _forget(self) -> None:
        self._last_read_s = None
        for part in (self._clocks, self._tenants, self._memory):
            part.reset()


def _closed_by(faults: set[Reason], state: LoadState, reasons: set[Reason]) -> LoadState:
    lost = "gpu_lost" in faults
    return LoadState(
        available=state.available and not lost,
        compute_scale=state.compute_scale,
        budget_scale=0.0 if lost else state.budget_scale,
        admission_scale=0.0 if faults & {"gpu_lost", "gpu_fault"} else state.admission_scale,
        reasons=tuple(reason for reason in REASONS if reason in reasons),
    )
