"""Learning rate over steps: up, flat, down to zero."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trtllm_dspark.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """A function of the step alone, so that a resumed run follows the same curve.

    Attributes:
        num_steps: steps of the run.
        warmup_steps: steps of the rise from 0.
        decay_share: last part of the run over which the rate falls linearly to 0.
    """

    num_steps: int
    warmup_steps: int = 20
    decay_share: float = 0.5

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.warmup_steps < 0 or not 0 <= self.decay_share <= 1:
            raise ConfigError("a schedule needs at least one step, no negative warm-up and a decay share from 0 to 1")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    def scale(self, step: int) -> float:
        """Return the factor of step 1..num_steps; the last step's is just above 0."""
        rise = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        decay = self.decay_share * self.num_steps
        fall = min(1.0, (self.num_steps + 1 - step) / decay) if decay else 1.0
        return rise * max(fall, 0.0)
