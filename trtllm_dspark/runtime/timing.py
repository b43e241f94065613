"""Where a round's time goes: engine passes and operations of the native core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from trtllm_dspark.runtime.stats import SessionStats

P = ParamSpec("P")
T = TypeVar("T")


class PassTimer:
    """Call things and add what they took to a session's counters.

    Args:
        stats: counters to add to.
        clock: seconds.
    """

    def __init__(self, stats: SessionStats, clock: Callable[[], float] = time.perf_counter) -> None:
        self.stats = stats
        self.clock = clock

    def on_engine(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call an engine pass."""
        start = self.clock()
        result = call(*args, **kwargs)
        self.stats.engine_s += self.clock() - start
        return result

    def in_core(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call an operation of the core."""
        start = self.clock()
        result = call(*args, **kwargs)
        self.stats.core_s += self.clock() - start
        return result
