"""What engines share that run rounds on a GPU, whatever their plans."""

from __future__ import annotations

import logging

from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.rounds import RoundBatch, RoundResult, Ticket
from trtllm_dspark.engine.tensorrt._buckets import ladder
from trtllm_dspark.engine.tensorrt._graphs import GraphStats
from trtllm_dspark.engine.tensorrt._model import SlotModel
from trtllm_dspark.engine.tensorrt._rounds import ROUNDS_IN_FLIGHT, RoundQueue
from trtllm_dspark.engine.tensorrt.device import Device
from trtllm_dspark.errors import DeviceError

logger = logging.getLogger(__name__)

NUM_GRAPHS = 64
"""CUDA graphs kept by default: a batch of 32 has 11 request buckets, each with a few of tokens."""


class RoundTimer:
    """Times parts of rounds on an idle engine as their differences: a captured round cannot be timed inside.

    Args:
        rounds: of the engine.
    """

    def __init__(self, rounds: RoundQueue) -> None:
        self._rounds = rounds

    def verify_us(self, num_requests: int, num_tokens: int, depth: int) -> float:
        """Return the microseconds of target pass, acceptance and context update; at least those of a plain round."""
        if num_tokens == num_requests:
            return self._rounds.time_round(num_requests, num_tokens, drafts=False, depth=depth)
        whole = self._rounds.time_round(num_requests, num_tokens, drafts=True, depth=depth)
        plain = self._rounds.time_round(num_requests, num_requests, drafts=False, depth=depth)
        return max(plain, whole - self.draft_us(num_requests, depth))

    def draft_us(self, num_requests: int, depth: int) -> float:
        """Return the microseconds of block, head and schedule: what they add to a plain round, at least 1."""
        whole = self._rounds.time_round(num_requests, num_requests, drafts=True, depth=depth)
        plain = self._rounds.time_round(num_requests, num_requests, drafts=False, depth=depth)
        # A difference of two medians may vanish in their noise, a draft cannot.
        return max(1.0, whole - plain)


class RoundRunner:
    """Rounds, slots and their end of life.

    Args:
        device: runs everything; closed by `close`.
        limits: shapes the engine was built for.
        model: plans and memory.
        rounds: over them, or None without a kernel library.
    """

    def __init__(self, device: Device, limits: EngineLimits, model: SlotModel, rounds: RoundQueue | None) -> None:
        self._device, self._limits, self._slots, self._rounds = device, limits, model, rounds
        self._closed = False

    @property
    def limits(self) -> EngineLimits:
        """Shapes the engine was built for."""
        return self._limits

    @property
    def device_name(self) -> str:
        """The GPU's name."""
        return self._device.name

    @property
    def rounds_in_flight(self) -> int:
        """Rounds that may be submitted and not collected; 0 without the kernel library."""
        return 0 if self._rounds is None else ROUNDS_IN_FLIGHT

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """Ascending tokens that target passes of rounds are padded to; empty where rounds run on the host."""
        return () if self._rounds is None else ladder(self._slots.decode_tokens)

    @property
    def pass_timer(self) -> RoundTimer | None:
        """Times rounds on the device, for cost tables; None without the kernel library."""
        return None if self._rounds is None else RoundTimer(self._rounds)

    @property
    def graph_stats(self) -> GraphStats | None:
        """Counters of the CUDA graphs, or None without the kernel library."""
        return None if self._rounds is None else self._rounds.graphs.stats

    def submit_round(self, batch: RoundBatch) -> Ticket:
        """Enqueue a round; see `RoundEngine`."""
        return self._queue().submit(batch)

    def collect_round(self, ticket: Ticket) -> RoundResult:
        """Wait for the oldest round; see `RoundEngine`."""
        return self._queue().collect(ticket)

    def copy_slot(self, source: int, destination: int, *, num_tokens: int, num_context: int) -> None:
        """Move a slot's caches and state behind everything that was enqueued; counts are upper bounds."""
        self._slots.copy_slot(source, destination, num_tokens, num_context)

    def close(self) -> None:
        """Wait for the device and release everything; calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            event = self._device.create_event()
            self._device.record(event, self._slots.stream)
            self._device.synchronize(event)
        except DeviceError as error:
            # A device that failed releases nothing in order; the driver does when the process ends.
            logger.warning("the device failed before it was closed: %s", error)
            return
        if self._rounds is not None:
            self._rounds.close()
        self._slots.close()
        self._device.close()

    def _queue(self) -> RoundQueue:
        if self._closed:
            raise DeviceError("the engine is closed; load it again")
        if self._rounds is None:
            raise DeviceError("rounds on the device need the kernel library; give its path when loading the engine")
        return self._rounds
