"""What the clocks say: by how much compute-bound work is stretched, and why."""

from __future__ import annotations

from trtllm_dspark.load._hysteresis import HeldLevel, Window
from trtllm_dspark.load.policy_config import PolicyConfig
from trtllm_dspark.load.sample import Sample
from trtllm_dspark.load.state import Reason

# NVML's nvmlClocksEventReasons bits.
CAUSES: tuple[tuple[Reason, int], ...] = (
    # HW slowdown, SW thermal, HW thermal.
    ("thermal_throttle", 0x8 | 0x20 | 0x40),
    # SW power cap, HW power brake, board limit.
    ("power_cap", 0x4 | 0x80 | 0x200),
    # Application clocks, sync boost, display clocks, reliability.
    ("clock_limit", 0x2 | 0x10 | 0x100 | 0x400),
)


class ClockPolicy:
    """Turn SM clocks and throttle reasons into a cost scale.

    Args:
        config: thresholds.
        reference_mhz: SM clock the cost table was measured at; None = the device's maximum.
    """

    def __init__(self, config: PolicyConfig, reference_mhz: int | None) -> None:
        self._config = config
        self._reference_mhz = reference_mhz
        self._scales = Window(config.window_s)
        self._level = HeldLevel(
            neutral=1.0,
            deadband=config.compute_deadband,
            attack_s=config.attack_s,
            release_s=config.release_s,
        )
        self._causes: set[Reason] = set()

    def update(self, sample: Sample) -> tuple[float, set[Reason]]:
        """Return the cost scale, at least 1, and its causes."""
        reference = self._reference_mhz or sample.sm_clock_max_mhz
        bits = sample.throttle_reasons or 0
        # An idle GPU lowers its clocks by itself: that says nothing about a busy one, in either direction.
        if reference and sample.sm_clock_mhz and not sample.idle:
            causes = self._causes_of(sample, bits, reference)
            scale = reference / sample.sm_clock_mhz if causes else 1.0
            self._scales.add(sample.time_s, min(max(scale, 1.0), self._config.max_compute_scale))
            self._causes |= causes
            level = self._level.update(sample.time_s, self._scales.mean(), self._scales.peak())
            if level == 1.0 and not causes:
                self._causes.clear()
        return self._level.level, set(self._causes) if self._level.raised else set()

    def reset(self) -> None:
        """Forget everything."""
        self._scales.clear()
        self._level.reset()
        self._causes.clear()

    def _causes_of(self, sample: Sample, bits: int, reference: int) -> set[Reason]:
        causes: set[Reason] = {reason for reason, mask in CAUSES if bits & mask}
        busy = (sample.sm_utilization or 0.0) >= self._config.busy_utilization
        slow = (sample.sm_clock_mhz or 0) < reference * (1 - self._config.compute_deadband)
        # Locked clocks are reported without a reason by some drivers.
        return causes or ({"clock_limit"} if busy and slow else set())
