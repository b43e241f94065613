"""One machine of a cluster: a replica, its device as NVML would describe it, and the load policy that reads it."""

from __future__ import annotations

from trtllm_dspark.load import LoadPolicy, LoadState, Sample
from trtllm_dspark.simulate.load_source import SimulatedMonitor
from trtllm_dspark.simulate.replica import Replica, SimRequest

MAX_CLOCK_MHZ = 1980
SW_THERMAL_SLOWDOWN, GPU_IDLE = 0x20, 0x1
"""NVML's clocks event reasons."""


class Node:
    """A replica on a device.

    Args:
        replica: the server.
        monitor: where its speculation reads the load of the device; None = nowhere.
        policy: turns readings of the device into decisions; None = the server does not look at its device.

    Attributes:
        clock: SM clock over its maximum.
        lost: whether the GPU is gone.
        ready: what a health check says; without NVML it notices a loss late.
        epoch: grows when everything under way is lost.
        starting: it was asked for and does not serve yet.
        draining: it takes no more requests.
        tries: how often each of its requests was sent before.
        state: decisions in force.
    """

    def __init__(
        self, replica: Replica, monitor: SimulatedMonitor | None = None, policy: LoadPolicy | None = None
    ) -> None:
        self.replica = replica
        self.clock = 1.0
        self.lost = False
        self.ready = True
        self.epoch = 0
        self.starting = self.draining = False
        self.tries: dict[int, int] = {}
        self.state = LoadState()
        self._monitor = monitor
        self._policy = policy

    @property
    def serving(self) -> bool:
        """Whether it is there to take requests, in good health or not."""
        return not (self.starting or self.draining)

    @property
    def aware(self) -> bool:
        """Whether the server reads its device."""
        return self._policy is not None

    def set_clock(self, clock: float) -> None:
        """Run at a share of the clock: what a pass takes beyond reading the weights is stretched."""
        self.clock = clock
        self.replica.stretch = 1 / clock
        self.replica.timed = True

    def lose(self) -> list[SimRequest]:
        """Lose the GPU and every request with it; return them."""
        self.lost = True
        self.epoch += 1
        return self.replica.evict()

    def sample(self, now: float) -> None:
        """Read the device and let the decisions act, as `runtime` does."""
        if self._policy is None:
            return
        self.state = self._policy.update(self._reading(now))
        if self._monitor is not None:
            self._monitor.now = self.state

    def _reading(self, now: float) -> Sample:
        if self.lost:
            return Sample(now, failure="gpu_lost", message="the GPU fell off the bus")
        busy = self.replica.busy
        reasons = 0 if busy else GPU_IDLE
        return Sample(
            now,
            generation=1 + self.epoch,
            sm_utilization=1.0 if busy else 0.0,
            sm_clock_mhz=round(MAX_CLOCK_MHZ * self.clock),
            sm_clock_max_mhz=MAX_CLOCK_MHZ,
            throttle_reasons=reasons | (SW_THERMAL_SLOWDOWN if self.clock < 1 else 0),
        )
