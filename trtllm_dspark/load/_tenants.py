"""What other processes on the device leave of the verify budget."""

from __future__ import annotations

from trtllm_dspark.load._hysteresis import HeldLevel, Window
from trtllm_dspark.load.policy_config import PolicyConfig
from trtllm_dspark.load.sample import Sample


class TenantPolicy:
    """Turn others' memory and use into a share of the budget."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._shares = Window(config.window_s)
        self._level = HeldLevel(
            neutral=0.0,
            deadband=config.tenant_deadband,
            attack_s=config.attack_s,
            release_s=config.release_s,
        )

    def update(self, sample: Sample) -> float:
        """Return the share of the budget that is ours."""
        self._shares.add(sample.time_s, self._share(sample))
        return 1.0 - self._level.update(sample.time_s, self._shares.mean(), self._shares.peak())

    def reset(self) -> None:
        """Forget everything."""
        self._shares.clear()
        self._level.reset()

    def _share(self, sample: Sample) -> float:
        config = self._config
        if sample.others_sm_utilization is not None:
            # Use below the deadband is noise: taken as none, so that the level returns to neutral.
            used = sample.others_sm_utilization if sample.others_sm_utilization > config.tenant_deadband else 0.0
        elif sample.others_memory_bytes is not None and sample.others_memory_bytes >= config.tenant_min_memory_bytes:
            used = config.tenant_unknown_share
        else:
            used = 0.0
        return min(used, config.tenant_max_share)
