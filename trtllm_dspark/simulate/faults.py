"""What goes wrong with a machine, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trtllm_dspark.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one replica.

    Attributes:
        kind: `throttle` (the SM clock falls) or `lost` (the GPU is gone and comes back empty).
        replica: which one, from 0.
        at_s: when it begins.
        for_s: how long it lasts.
        clock: `throttle` only: clock over its maximum.
    """

    kind: Literal["throttle", "lost"]
    replica: int
    at_s: float
    for_s: float
    clock: float = 1.0

    @staticmethod
    def parse(text: str) -> Fault:
        """Read `throttle:REPLICA:AT_S:FOR_S:CLOCK` or `lost:REPLICA:AT_S:FOR_S`.

        Raises:
            ConfigError: another form.
        """
        kind, *rest = text.strip().split(":")
        try:
            numbers = [float(part) for part in rest]
            good = all(math.isfinite(number) and number >= 0 for number in numbers)
            if good and kind == "lost" and len(numbers) == 3:
                return Fault("lost", int(numbers[0]), numbers[1], numbers[2])
            if good and kind == "throttle" and len(numbers) == 4 and 0 < numbers[3] <= 1:
                return Fault("throttle", int(numbers[0]), numbers[1], numbers[2], numbers[3])
        except ValueError:
            pass
        raise ConfigError(
            f"fault '{text}' is not known; use throttle:REPLICA:AT_S:FOR_S:CLOCK with a clock in (0, 1], "
            "or lost:REPLICA:AT_S:FOR_S"
        )
