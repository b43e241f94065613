"""What the load of the device means for the next round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Reason = Literal[
    "thermal_throttle",
    "power_cap",
    "clock_limit",
    "co_tenant",
    "memory_pressure",
    "gpu_lost",
    "gpu_fault",
    "xid",
    "mig_parent",
    "no_driver",
    "no_gpu",
    "no_library",
    "unreadable",
    "stale",
]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class LoadState:
    """Three numbers the scheduler and the batcher apply, and why.

    It is made of past samples only, never of drafts, so a round that applies it stays lossless.

    Attributes:
        available: whether it rests on readings of a device; False means the numbers are neutral, or the GPU is lost.
        compute_scale: at least 1; how much longer compute-bound work takes than when the cost table was measured.
        budget_scale: [0, 1]; share of the verify budget that remains ours.
        admission_scale: [0, 1]; share of the slots new requests may fill; 0 closes admission. Running requests stay.
        reasons: why, in the order of `REASONS`; empty when nothing is wrong.
    """

    available: bool = False
    compute_scale: float = 1.0
    budget_scale: float = 1.0
    admission_scale: float = 1.0
    reasons: tuple[Reason, ...] = ()

    @property
    def admission_closed(self) -> bool:
        """Whether no new request may get a slot."""
        return self.admission_scale <= 0

    def verify_budget(self, budget: int) -> int:
        """Return the drafts that may be verified of `budget`."""
        return int(budget * self.budget_scale)

    def max_requests(self, max_requests: int) -> int:
        """Return how many of `max_requests` slots may be filled: 0 when closed, else at least 1."""
        return 0 if self.admission_closed else max(1, int(max_requests * self.admission_scale))

    def stretch(self, step_time_us: NDArray[np.float32]) -> NDArray[np.float32]:
        """Stretch the compute-bound part of step times by `compute_scale`.

        The time of one token is the time of reading the weights: memory does not slow down with the SM clock. What
        a pass takes beyond it is computation.

        Args:
            step_time_us: [B + 1] float32 microseconds of a pass over 0..B tokens; entry 0 is unused.

        Returns:
            [B + 1] float32; entry 1 is unchanged, and a monotone table stays monotone.
        """
        if self.compute_scale == 1.0 or len(step_time_us) < 2:
            return step_time_us
        floor = step_time_us[1]
        beyond = np.maximum(step_time_us - floor, np.float32(0))
        stretched: NDArray[np.float32] = np.minimum(step_time_us, floor) + beyond * np.float32(self.compute_scale)
        return stretched
