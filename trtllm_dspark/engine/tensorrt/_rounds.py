"""Rounds in flight: what the host writes and reads, and when.

One stream carries everything, so a round begins where the last one ended and nothing on the device waits for the host.
The host's part of a round is two copies: its inputs, before, and its results, behind it. It waits for the results of
round n only after it has enqueued round n + 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.rounds import (
    DecodeRows,
    PromptRows,
    RoundBatch,
    RoundResult,
    RowResults,
    RowSampling,
    Ticket,
)
from trtllm_dspark.engine.tensorrt._arrays import (
    ACCEPTANCES,
    FIXED_MODE,
    MAX_BANNED,
    SCHEDULE_MODES,
    RoundArrays,
)
from trtllm_dspark.engine.tensorrt._buckets import RoundKey, choose_key
from trtllm_dspark.engine.tensorrt._graphs import GraphCache
from trtllm_dspark.engine.tensorrt._memory import Layout, Pinned, PinnedRing
from trtllm_dspark.engine.tensorrt._model import SlotModel
from trtllm_dspark.engine.tensorrt._staging import stage
from trtllm_dspark.engine.tensorrt.device import PlanContext
from trtllm_dspark.errors import DeviceError

ROUNDS_IN_FLIGHT = 2
_DEPTH = ROUNDS_IN_FLIGHT + 1


@dataclass(slots=True)
class _Flight:
    """A submitted round: its sizes and where its results will be."""

    number: Ticket
    start: int
    num_decoding: int
    num_completed: int
    confidence: bool
    drafted: bool
    decode: Pinned | None = None
    prompts: Pinned | None = None


class RoundPasses(Protocol):
    """What a decoding round and prompts are made of: differs with the lowering of the plans."""

    arrays: RoundArrays

    @property
    def has_confidence(self) -> bool:
        """Whether rounds with drafts compute confidences."""
        ...

    def contexts(self, key: RoundKey) -> Sequence[PlanContext]:
        """Return contexts bound to a key's shapes."""
        ...

    def enqueue(self, key: RoundKey, contexts: Sequence[PlanContext]) -> None:
        """Enqueue one round; everything but the key is read on the device."""
        ...

    def enqueue_prompts(
        self, prompts: PromptRows, acceptance: int, state: Mapping[int, NDArray[Any]], ring: PinnedRing
    ) -> None:
        """Enqueue a pass over prompt chunks, and the first token of those that end with it.

        Args:
            prompts: the chunks; the sampling parameters of their first tokens are on their way.
            acceptance: code of the mode.
            state: what the host sets of the slots before the pass, by address.
            ring: carries what the host writes.
        """
        ...


class RoundQueue:
    """Submits and collects rounds over a model.

    Args:
        model: plans and memory.
        passes: what rounds are made of.
        num_graphs: CUDA graphs kept at most.
        cuda_graphs: False runs rounds launch by launch.
    """

    def __init__(self, model: SlotModel, passes: RoundPasses, *, num_graphs: int, cuda_graphs: bool = True) -> None:
        device, arrays = model.device, passes.arrays
        self._model, self._round, self._arrays = model, passes, arrays
        self._inputs, self._outputs = arrays.inputs, arrays.outputs
        self._prompt_inputs, self._prompt_outputs = arrays.prompt_inputs, arrays.prompt_outputs
        self._memory = arrays.memory
        self.graphs = GraphCache(device, num_graphs, enabled=cuda_graphs)
        self._uploads = {layout: PinnedRing(device, _DEPTH, layout) for layout in self._uploaded}
        self._results = {layout: PinnedRing(device, _DEPTH, layout) for layout in self._downloaded}
        self._staging = PinnedRing(device, _DEPTH)
        self._starts = [device.create_event() for _ in range(_DEPTH)]
        self._flights: deque[_Flight] = deque()
        self._nothing = device.allocate_pinned(self._inputs.num_bytes)
        views = self._inputs.views(self._nothing)
        self._nothing[:] = 0
        _write_greedy(views)
        views["inv_temperature"][:] = 1.0
        self._next: Ticket = 0

    @property
    def _uploaded(self) -> tuple[Layout, ...]:
        return self._inputs, self._prompt_inputs

    @property
    def _downloaded(self) -> tuple[Layout, ...]:
        return self._outputs, self._prompt_outputs

    @property
    def num_in_flight(self) -> int:
        """Rounds that were submitted and not collected."""
        return len(self._flights)

    def submit(self, batch: RoundBatch) -> Ticket:
        """Enqueue a round; see `RoundEngine.submit_round`."""
        if len(self._flights) >= ROUNDS_IN_FLIGHT:
            raise RuntimeError(f"{ROUNDS_IN_FLIGHT} rounds are in flight; collect one first")
        model, acceptance = self._model, ACCEPTANCES[batch.acceptance]
        decode, prompts = batch.decode, batch.prompts
        # What is refused is refused before anything is enqueued: a round half on its way would never be collected.
        key = None if decode is None else self.key(decode, acceptance)
        self._check(batch)
        flight = _Flight(
            number=self._next,
            start=self._starts[self._next % _DEPTH],
            num_decoding=0 if decode is None else decode.max_drafts.size,
            num_completed=0 if prompts is None else prompts.max_new_tokens.size,
            drafted=decode is not None and decode.schedule is not None,
            confidence=False,
        )
        model.device.record(flight.start, model.stream)
        if decode is not None and key is not None:
            flight.confidence = flight.drafted and self._round.has_confidence
            self._enqueue_decode(decode, key, flight.number)
            flight.decode = self._fetch(self._outputs)
        if prompts is not None:
            self._enqueue_prompts(prompts, acceptance)
            if flight.num_completed:
                flight.prompts = self._fetch(self._prompt_outputs)
        self._flights.append(flight)
        self._next += 1
        return flight.number

    def collect(self, ticket: Ticket) -> RoundResult:
        """Wait for the oldest round; see `RoundEngine.collect_round`."""
        if not self._flights or self._flights[0].number != ticket:
            raise RuntimeError(f"round {ticket} is not the oldest one in flight; collect rounds in order")
        flight = self._flights.popleft()
        end = flight.start
        decode = verify_len = draft_failed = confidence = prompts = None
        if flight.decode is not None:
            views = self._read(self._outputs, flight.decode)
            count, end = flight.num_decoding, flight.decode.event
            decode = _rows(views, count)
            verify_len = views["verify_len"][:count].astype(np.int64)
            draft_failed = (views["draft_status"][:count] != 0) & flight.drafted
            confidence = views["confidence"][:count].copy() if flight.confidence else None
            self._results[self._outputs].release(flight.decode)
        if flight.prompts is not None:
            views = self._read(self._prompt_outputs, flight.prompts)
            end = flight.prompts.event
            prompts = _rows(views, flight.num_completed)
            self._results[self._prompt_outputs].release(flight.prompts)
        device_us = 0.0 if end == flight.start else self._model.device.elapsed_us(flight.start, end)
        self.graphs.collected(ticket)
        return RoundResult(decode, verify_len, draft_failed, confidence, prompts, device_us)

    def time_round(self, num_requests: int, num_tokens: int, *, drafts: bool, depth: int) -> float:
        """Return the microseconds a round of this size takes on the device while nothing else runs.

        Every row rides along with `depth` tokens cached, so slots must be free. Padding is computed like tokens, so
        what a round costs does not depend on how many of its tokens are real.

        Args:
            num_requests: R.
            num_tokens: T of the target pass, R to R times a block and its anchor.
            drafts: whether the block, the head and the schedule run.
            depth: tokens cached of each row.
        """
        if self._flights:
            raise RuntimeError("rounds are timed on an idle engine only; collect those in flight first")
        model = self._model
        draft_len = model.limits.max_draft_len if drafts else 0
        key = RoundKey(num_requests, num_tokens, draft_len, FIXED_MODE, ACCEPTANCES["rejection"], bans=False)
        captured = self.graphs.get(key, model.stream, self._round.contexts, self._round.enqueue, self._idle)
        stage(model, self._staging, {self._memory["positions"]: np.full(num_requests, depth, np.int32)})
        self._idle()
        start, end = self._starts[0], self._starts[1]
        model.device.record(start, model.stream)
        self.graphs.launch(key, captured, model.stream, self._round.enqueue, self._next)
        model.device.record(end, model.stream)
        model.device.synchronize(end)
        self.graphs.collected(self._next)
        return model.device.elapsed_us(start, end)

    def close(self) -> None:
        """Forget rounds in flight and release the graphs; the device must be idle."""
        self._flights.clear()
        self.graphs.close()

    def key(self, decode: DecodeRows, acceptance: int) -> RoundKey:
        """Return the bucket of a decoding round.

        Raises:
            DeviceError: the round exceeds what the plans take.
        """
        limits, count = self._model.limits, decode.max_drafts.size
        schedule = decode.schedule
        drafts = 0
        if schedule is not None:
            drafts = min(int(decode.max_drafts.sum()), schedule.token_budget)
            if schedule.mode == "stale_topk":
                drafts = min(drafts, schedule.budget)
        if not 0 < count <= limits.max_batch_size or count + drafts > self._model.decode_tokens:
            raise DeviceError(
                f"a round of {count} requests and {drafts} drafts exceeds the engine's "
                f"{limits.max_batch_size} requests or {self._model.decode_tokens} tokens; build it with larger limits"
            )
        return choose_key(
            count,
            drafts,
            draft_len=0 if schedule is None else limits.max_draft_len,
            mode=FIXED_MODE if schedule is None else SCHEDULE_MODES[schedule.mode],
            acceptance=acceptance,
            bans=bool(decode.sampling.ban_until.any()),
            max_requests=limits.max_batch_size,
            max_tokens=self._model.decode_tokens,
        )

    def _check(self, batch: RoundBatch) -> None:
        """Refuse prompts beyond the limits, and rows with more banned tokens than there is room for."""
        prompts, limits = batch.prompts, self._model.limits
        if prompts is not None:
            ends = prompts.write_indices + prompts.row_lens
            if int(ends.max()) > limits.max_seq_len or prompts.token_ids.size > limits.max_num_tokens:
                raise DeviceError("a prompt chunk ends beyond the engine's limits; build it with larger ones")
        for rows in (batch.decode, prompts):
            if rows is not None and rows.sampling.ban_until.any():
                most = max(len(ids) for ids in rows.sampling.banned)
                if most > MAX_BANNED:
                    raise DeviceError(f"a request bans {most} tokens, the engine at most {MAX_BANNED}")

    def _enqueue_decode(self, decode: DecodeRows, key: RoundKey, number: Ticket) -> None:
        model = self._model
        captured = self.graphs.get(key, model.stream, self._round.contexts, self._round.enqueue, self._idle)
        ring = self._uploads[self._inputs]
        piece = ring.take()
        _write_decode(piece.views, decode, key)
        model.device.to_device(self._arrays.base(self._inputs), piece.memory, model.stream)
        ring.give(piece, model.stream)
        self.graphs.launch(key, captured, model.stream, self._round.enqueue, number)

    def _idle(self) -> None:
        """Enqueue inputs of a round in which every row rides along; nobody writes into them, so they need no event."""
        self._model.device.to_device(self._arrays.base(self._inputs), self._nothing, self._model.stream)

    def _enqueue_prompts(self, prompts: PromptRows, acceptance: int) -> None:
        model, completed = self._model, prompts.max_new_tokens.size
        ends = prompts.write_indices + prompts.row_lens
        # What is cached of each row; a prompt's last token is the anchor of its first output token.
        cached = ends.copy()
        cached[:completed] -= 1
        remaining = np.zeros(ends.size, np.int32)
        remaining[:completed] = prompts.max_new_tokens
        ring = self._uploads[self._prompt_inputs]
        piece = ring.take()
        piece.views["active"][0] = completed
        _write_sampling(piece.views, prompts.sampling)
        model.device.to_device(self._arrays.base(self._prompt_inputs), piece.memory, model.stream)
        ring.give(piece, model.stream)
        slot = 4 * prompts.first_slot
        state = {
            self._memory["positions"] + slot: cached.astype(np.int32),
            self._memory["remaining"] + slot: remaining,
        }
        self._round.enqueue_prompts(prompts, acceptance, state, self._staging)

    def _fetch(self, layout: Layout) -> Pinned:
        model, ring = self._model, self._results[layout]
        piece = ring.take()
        model.device.to_host(piece.memory, self._arrays.base(layout), model.stream)
        ring.give(piece, model.stream, results=True)
        return piece

    def _read(self, layout: Layout, piece: Pinned) -> dict[str, NDArray[Any]]:
        self._results[layout].wait(piece)
        return piece.views


def _rows(views: Mapping[str, NDArray[Any]], count: int) -> RowResults:
    return RowResults(
        tokens=views["out_tokens"][:count].astype(np.int64),
        emitted_len=views["emitted_len"][:count].astype(np.int64),
        status=views["status"][:count].astype(np.int64),
    )


def _write_greedy(views: Mapping[str, NDArray[Any]]) -> None:
    """Make every row greedy and ban nothing: what rows that ride along get."""
    for name, value in {"temperature": 0, "top_k": 0, "top_p": 1, "seed": 0, "ban_until": 0, "banned": -1}.items():
        views[name][...] = value


def _write_sampling(views: Mapping[str, NDArray[Any]], sampling: RowSampling) -> None:
    _write_greedy(views)
    count = sampling.temperature.size
    views["temperature"][:count] = sampling.temperature
    views["top_k"][:count] = sampling.top_k
    views["top_p"][:count] = sampling.top_p
    views["seed"][:count] = sampling.seed.view(np.int64)
    views["ban_until"][:count] = sampling.ban_until
    if sampling.ban_until.any():
        for row, ids in enumerate(sampling.banned):
            views["banned"][row, : len(ids)] = ids


def _write_decode(views: Mapping[str, NDArray[Any]], decode: DecodeRows, key: RoundKey) -> None:
    count, schedule = decode.max_drafts.size, decode.schedule
    views["active"][0] = count
    views["max_drafts"][:] = 0
    views["thresholds"][:] = 0.0
    views["inv_temperature"][:] = 1.0
    views["position_bias"][:] = 0.0
    _write_sampling(views, decode.sampling)
    views["limits"][:] = 0
    views["terms"][:] = (0.0, 1.0, 0.0)
    if schedule is None:
        return
    views["max_drafts"][:count] = decode.max_drafts
    # Never more than the bucket's tokens, whatever the schedule would like.
    budget = min(schedule.token_budget, key.num_tokens - key.num_requests)
    views["limits"][:] = (schedule.draft_len, schedule.budget, budget, 0)
    views["thresholds"][:count] = schedule.threshold
    views["terms"][:] = (0.0, schedule.load_scale, schedule.fixed_time_us)
    if schedule.temperature is not None:
        views["inv_temperature"][: schedule.temperature.size] = np.float32(1) / schedule.temperature
    if schedule.bias is not None:
        views["position_bias"][: schedule.bias.size] = schedule.bias
    table, known = views["step_time_us"], 0
    if schedule.step_time_us is not None:
        known = min(table.size, schedule.step_time_us.size)
        table[:known] = schedule.step_time_us[:known]
    # Beyond the known sizes nothing is known: the kernel takes such a table as missing. The memory held other rounds'.
    table[known:] = np.nan
