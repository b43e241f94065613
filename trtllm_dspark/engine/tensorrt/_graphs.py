"""Captured rounds: one CUDA graph a key, the least recently used ones are given up."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtllm_dspark.engine.tensorrt._buckets import RoundKey
from trtllm_dspark.engine.tensorrt.device import Device, PlanContext
from trtllm_dspark.errors import DeviceError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CapturedRound:
    """Contexts bound to one key's shapes, and the graph of their passes; None where it could not be captured."""

    contexts: Sequence[PlanContext]
    graph: int | None = None
    last_round: int = -1


@dataclass(slots=True)
class GraphStats:
    """Counters of the graphs of an engine.

    Attributes:
        replays: rounds that were one graph launch.
        misses: keys that had to be captured first.
        eager_rounds: rounds that ran launch by launch.
        evictions: graphs given up for others.
    """

    replays: int = 0
    misses: int = 0
    eager_rounds: int = 0
    evictions: int = 0


class GraphCache:
    """Rounds by key.

    Args:
        device: captures and launches.
        capacity: graphs kept at most; at least 1.
        enabled: False runs every round launch by launch.
    """

    def __init__(self, device: Device, capacity: int, *, enabled: bool = True) -> None:
        self._device, self._capacity, self._enabled = device, capacity, enabled
        self._rounds: OrderedDict[RoundKey, CapturedRound] = OrderedDict()
        self._retired: list[CapturedRound] = []
        self.stats = GraphStats()

    def __len__(self) -> int:
        """Return how many rounds are kept."""
        return len(self._rounds)

    def get(
        self,
        key: RoundKey,
        stream: int,
        contexts: Callable[[RoundKey], Sequence[PlanContext]],
        enqueue: Callable[[RoundKey, Sequence[PlanContext]], None],
        idle: Callable[[], None],
    ) -> CapturedRound:
        """Return the round of a key, captured on its first use.

        A plan's first pass of a shape may allocate and load kernels, which a capture forbids: it runs once with no live
        row before it is captured.

        Args:
            key: what the round fixes.
            stream: where rounds run.
            contexts: makes the key's contexts.
            enqueue: enqueues a round of the key over contexts.
            idle: makes every row of the next round ride along.

        Raises:
            DeviceError: the device refuses the round itself.
        """
        found = self._rounds.get(key)
        if found is not None:
            self._rounds.move_to_end(key)
            return found
        self.stats.misses += 1
        found = CapturedRound(contexts(key))
        try:
            idle()
            enqueue(key, found.contexts)
            if self._enabled:
                found.graph = self._capture(key, found, stream, enqueue)
        except BaseException:
            # Some of its passes may be queued, and no round says when they are done: `close` releases them.
            found.last_round = sys.maxsize
            self._retired.append(found)
            raise
        self._rounds[key] = found
        if len(self._rounds) > self._capacity:
            _, oldest = self._rounds.popitem(last=False)
            self._retired.append(oldest)
            self.stats.evictions += 1
        # Not for everybody: traffic of many shapes has many.
        logger.debug("captured a round of %s (%d kept, %d misses)", key, len(self._rounds), self.stats.misses)
        return found

    def launch(
        self,
        key: RoundKey,
        found: CapturedRound,
        stream: int,
        enqueue: Callable[[RoundKey, Sequence[PlanContext]], None],
        number: int,
    ) -> None:
        """Enqueue round `number`."""
        found.last_round = number
        if found.graph is not None:
            self._device.launch_graph(found.graph, stream)
            self.stats.replays += 1
        else:
            enqueue(key, found.contexts)
            self.stats.eager_rounds += 1

    def collected(self, number: int) -> None:
        """Release graphs that were given up and whose last round is `number` or earlier: the device is done with it."""
        waiting = [entry for entry in self._retired if entry.last_round > number]
        for entry in self._retired:
            if entry.last_round <= number:
                self._release(entry)
        self._retired = waiting

    def close(self) -> None:
        """Release everything; no round may be running."""
        for entry in [*self._retired, *self._rounds.values()]:
            self._release(entry)
        self._retired, self._rounds = [], OrderedDict()

    def _capture(
        self,
        key: RoundKey,
        found: CapturedRound,
        stream: int,
        enqueue: Callable[[RoundKey, Sequence[PlanContext]], None],
    ) -> int | None:
        self._device.begin_capture(stream)
        failure: DeviceError | None = None
        try:
            enqueue(key, found.contexts)
        except DeviceError as error:
            failure = error
        # The stream must leave capture whatever happened.
        try:
            graph = self._device.end_capture(stream)
        except DeviceError as error:
            failure = failure or error
        if failure is not None:
            logger.warning("rounds of %s run without a CUDA graph, launch by launch: %s", key, failure)
            return None
        return graph

    def _release(self, entry: CapturedRound) -> None:
        if entry.graph is not None:
            self._device.free_graph(entry.graph)
        for context in entry.contexts:
            context.close()
