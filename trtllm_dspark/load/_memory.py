"""When to stop admitting before an allocation fails."""

from __future__ import annotations

from trtllm_dspark.load._hysteresis import HeldLevel, Window
from trtllm_dspark.load.policy_config import PolicyConfig
from trtllm_dspark.load.sample import Sample

# An engine that fills the device on purpose must not close admission for ever: of what was free at the first sample
# after it was loaded, these shares are the limits when they are the lower ones.
FIRST_LOW = 0.75
FIRST_CRITICAL = 0.5


class MemoryPolicy:
    """Turn free memory, and how fast it falls, into a share of the slots."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._free = Window(config.window_s)
        self._first_free: int | None = None
        # Closing waits for nothing; only opening does.
        self._level = HeldLevel(neutral=0.0, deadband=0.0, attack_s=0.0, release_s=config.release_s)

    def update(self, sample: Sample) -> float:
        """Return the share of the slots that new requests may fill."""
        config = self._config
        if sample.memory_free_bytes is not None and sample.memory_total_bytes:
            first = self._first_free = sample.memory_free_bytes if self._first_free is None else self._first_free
            self._free.add(sample.time_s, sample.memory_free_bytes)
            expected = sample.memory_free_bytes - config.memory_horizon_s * self._free.falling_rate()
            low = min(config.memory_low * sample.memory_total_bytes, FIRST_LOW * first)
            critical = min(config.memory_critical * sample.memory_total_bytes, FIRST_CRITICAL * first)
            pressure = 1.0 if expected < critical else 1.0 - config.admission_cap if expected < low else 0.0
            self._level.update(sample.time_s, pressure)
        return 1.0 - self._level.level

    def reset(self) -> None:
        """Forget everything."""
        self._free.clear()
        self._first_free = None
        self._level.reset()
