"""Autoscaling as deploy/kubernetes/autoscaling.yaml asks for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.simulate.node import Node


@dataclass
class Autoscaler:
    """Ask for replicas so that two metrics stay at their thresholds; the larger answer counts.

    Attributes:
        least: replicas at least.
        most: replicas at most.
        waiting_per_replica: threshold of requests that wait, a replica (`dspark_requests_waiting`).
        slots_used: threshold of the share of slots in use (`dspark_slots`).
        period_s: seconds between looks.
        startup_s: seconds from asking for a replica to its first request.
        cooldown_s: seconds over which the largest answer holds, so that replicas are not given up at once.
    """

    least: int
    most: int
    waiting_per_replica: float = 4.0
    slots_used: float = 0.8
    period_s: float = 15.0
    startup_s: float = 60.0
    cooldown_s: float = 300.0
    _answers: list[tuple[float, int]] = field(default_factory=list)

    @staticmethod
    def parse(text: str) -> Autoscaler:
        """Read `LEAST:MOST[:STARTUP_S[:COOLDOWN_S]]`.

        Raises:
            ConfigError: another form.
        """
        parts = text.split(":")
        try:
            least, most = int(parts[0]), int(parts[1])
            times = [float(part) for part in parts[2:]]
            if 1 <= least <= most and len(times) <= 2 and all(0 <= time < math.inf for time in times):
                startup_s, cooldown_s = [*times, *(60.0, 300.0)[len(times) :]]
                return Autoscaler(least, most, startup_s=startup_s, cooldown_s=cooldown_s)
        except (ValueError, IndexError):
            pass
        raise ConfigError(f"autoscaling '{text}' is not known; use LEAST:MOST[:STARTUP_S[:COOLDOWN_S]]")

    def wanted(self, now: float, nodes: Sequence[Node]) -> int:
        """Return how many replicas there should be, from the metrics of those that serve."""
        count = max(1, len(nodes))
        waiting = sum(node.replica.num_waiting for node in nodes) / count
        slots = sum(node.replica.server.max_batch_size for node in nodes) or 1
        used = sum(node.replica.num_running for node in nodes) / slots
        ratio = max(waiting / self.waiting_per_replica, used / self.slots_used)
        answer = min(self.most, max(self.least, math.ceil(count * ratio - 1e-9)))
        self._answers = [(when, value) for when, value in self._answers if when > now - self.cooldown_s]
        self._answers.append((now, answer))
        return max(value for _, value in self._answers)
