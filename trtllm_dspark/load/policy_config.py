"""The numbers of the load policy; docs/load.md lists and explains them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trtllm_dspark.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Thresholds and times of `LoadPolicy`.

    Attributes:
        attack_s: seconds a worse reading must last before it counts.
        release_s: seconds a better reading must last before it counts; also how long the last decision holds when
            readings fail.
        window_s: seconds over which clocks and others' use are averaged.
        max_compute_scale: most that lower clocks stretch the cost table.
        compute_deadband: change of `compute_scale` that is ignored.
        busy_utilization: SM utilisation from which a low clock without any stated reason counts as a limit.
        tenant_min_memory_bytes: memory of others below which they do not count.
        tenant_unknown_share: share assumed for others whose use cannot be read.
        tenant_max_share: most that others take of the verify budget.
        tenant_deadband: others' share, or a change of it, that is ignored.
        memory_low: share of free memory below which admission is capped.
        memory_critical: share of free memory below which admission closes.
        memory_horizon_s: seconds a steady fall of free memory is extrapolated.
        admission_cap: share of the slots that may be filled while memory is low.
        fault_hold_s: seconds admission stays closed after an uncorrected memory error.
    """

    attack_s: float = 0.4
    release_s: float = 5.0
    window_s: float = 1.0
    max_compute_scale: float = 4.0
    compute_deadband: float = 0.05
    busy_utilization: float = 0.5
    tenant_min_memory_bytes: int = 256 << 20
    tenant_unknown_share: float = 0.25
    tenant_max_share: float = 0.75
    tenant_deadband: float = 0.05
    memory_low: float = 0.05
    memory_critical: float = 0.02
    memory_horizon_s: float = 2.0
    admission_cap: float = 0.5
    fault_hold_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ConfigError(f"load policy: {field.name} is {getattr(self, field.name)}; it must not be negative")
        for name in ("tenant_unknown_share", "tenant_max_share", "memory_low", "memory_critical", "admission_cap"):
            if getattr(self, name) > 1:
                raise ConfigError(f"load policy: {name} is {getattr(self, name)}; it is a share of at most 1")
        if self.memory_critical > self.memory_low:
            raise ConfigError(
                f"load policy: memory_critical {self.memory_critical} must not exceed memory_low {self.memory_low}"
            )
        if self.max_compute_scale < 1:
            raise ConfigError(f"load policy: max_compute_scale is {self.max_compute_scale}; it must be at least 1")
