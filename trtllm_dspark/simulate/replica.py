"""One server in simulated time: the serving code's queue, batcher and schedules around an engine made of numbers.

A round follows `runtime.Session` step by step. What differs: tokens have no values, passes take what the cost table
says, and whether drafts are accepted was drawn beforehand. Like the server it never preempts: a request holds one slot,
whose memory is `max_seq_len` tokens, from admission to its end; the others wait.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.engine.base import IntArray
from trtllm_dspark.engine_process.queue import RequestQueue
from trtllm_dspark.engine_process.streams import Stream
from trtllm_dspark.errors import RequestError
from trtllm_dspark.runtime.batcher import Batcher, PromptChunk
from trtllm_dspark.simulate.pool import BlockPool
from trtllm_dspark.simulate.records import RequestRecord, RoundLog
from trtllm_dspark.simulate.server import Policy, Server
from trtllm_dspark.simulate.speculator import Decision, Speculator
from trtllm_dspark.simulate.times import EngineTimes
from trtllm_dspark.simulate.traffic import Arrival

_POSITION, _REMAINING, _BLOCK, _ROUNDS, _VERIFIED, _ACCEPTED = range(6)
_COLUMNS = 6
_NOTHING: IntArray = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request inside a replica: what `runtime.batcher` asks of one, and its record."""

    arrival: Arrival
    record: RequestRecord
    num_cached: int = 0

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return self.arrival.prompt_tokens


@dataclass(slots=True)
class _Started:
    """A round under way.

    Attributes:
        chunks: prompt chunks it prefills.
        accepted: [R] drafts accepted of every decoding request.
        decision: what the controller decided, or None where nothing speculates.
        draft_us: microseconds of drafting, or None.
        verify_us: microseconds of the target pass over decoding requests, or None; both None where nobody compares.
    """

    chunks: tuple[PromptChunk[SimRequest], ...]
    accepted: IntArray
    decision: Decision | None
    draft_us: float | None
    verify_us: float | None


class Replica:
    """One server.

    Args:
        server: limits and times.
        policy: how it drafts.
        pool: blocks of every domain.
        speculator: the serving code's decisions for this policy, or None for plain decoding.
        seed: of the requests' places in the pool.
        number: its place in a cluster.

    Attributes:
        log: its rounds.
        stretch: how much longer what a pass takes beyond reading the weights is than the table says.
        timed: whether the controller is told what passes took; it makes a difference where they are stretched.
    """

    def __init__(
        self,
        server: Server,
        policy: Policy,
        pool: BlockPool,
        speculator: Speculator | None,
        *,
        seed: int,
        number: int = 0,
    ) -> None:
        self.server = server
        self.number = number
        self.log = RoundLog()
        self.stretch = 1.0
        self.timed = False
        self._pool = pool
        self._speculator = speculator
        self._generator = np.random.default_rng([seed, number, 11])
        self._times = EngineTimes(server.table_of(policy), max_tokens=server.max_num_tokens + server.max_batch_size)
        self._queue = RequestQueue(max_waiting=server.max_queue_size)
        self._waiting: dict[int, SimRequest] = {}
        self._batcher: Batcher[SimRequest] = Batcher(server.max_num_tokens)
        self._prefilling: list[SimRequest] = []
        self._decoding: list[SimRequest] = []
        self._keys: list[Hashable] = []
        self._cached = 0
        self._state = np.zeros((_COLUMNS, server.max_batch_size), np.int64)
        self._round: _Started | None = None

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue) + len(self._batcher)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        return self._round is not None

    def submit(self, arrival: Arrival, record: RequestRecord, now: float) -> bool:
        """Queue a request, or refuse it as the server would; return whether it was taken."""
        record.replica = self.number
        if arrival.prompt_tokens >= self.server.max_seq_len:
            record.error = "prompt_too_long"
            return False
        stream = Stream(_nowhere, 0, record.index, "", "", now)
        try:
            self._queue.push(stream, num_free=self.server.max_batch_size - self.num_running - len(self._batcher))
        except RequestError as error:
            record.error = error.code
            return False
        self._waiting[record.index] = SimRequest(arrival, record)
        return True

    def evict(self) -> list[SimRequest]:
        """Lose every request, running or waiting, and the round under way; return them."""
        lost = [*self._decoding, *self._prefilling, *self._batcher, *self._waiting.values()]
        for request in lost:
            request.num_cached = 0
            if self._speculator is not None:
                self._speculator.controller.forget(request.record.index)
        self._queue = RequestQueue(max_waiting=self.server.max_queue_size)
        self._batcher = Batcher(self.server.max_num_tokens)
        self._waiting.clear()
        self._decoding.clear()
        self._prefilling.clear()
        self._keys, self._cached, self._round = [], 0, None
        return lost

    def start(self, now: float) -> float | None:
        """Start a round; return its seconds, or None when there is nothing to do."""
        self._admit()
        count = len(self._decoding)
        state = self._state[:, :count]
        caps, wanted = self._caps(state)
        plan = self._batcher.plan(
            num_decoding=count,
            drafts_wanted=wanted,
            prefilling=self._prefilling,
            num_free=self.server.max_batch_size - self.num_running,
        )
        for request in plan.admitted:
            request.record.scheduled_s = now
            self._prefilling.append(request)
        if not count and not plan.chunks:
            return None
        depth = self._cached / count if count else 0.0
        decision, accepted = None, _NOTHING
        if count:
            decision, accepted = self._decode(state, caps, plan.draft_budget, int(depth))
        drafts = 0 if decision is None else int(np.add.reduce(decision.verify_len))
        whole = decision is None or not decision.num_drafted or drafts == wanted
        num_drafted = 0 if decision is None else decision.num_drafted
        draft_us, verify_us, prefill_us = self._pass_us(count, drafts, num_drafted, depth, plan.chunks)
        verify_us += 0.0 if whole else self.server.ragged_us
        host_us = self.server.host_us + self.server.host_token_us * (count + drafts)
        micros = (draft_us or 0.0) + verify_us + prefill_us + host_us
        # A pass that takes what the table says teaches nothing, one that prompts share cannot be compared.
        told = self.timed and not (plan.chunks and self.server.shared_prefill)
        self._round = _Started(
            plan.chunks, accepted, decision, draft_us if self.timed else None, verify_us if told else None
        )
        log = self.log
        log.start_s.append(now)
        log.duration_us.append(micros)
        log.num_requests.append(count)
        log.drafts.append(drafts)
        log.accepted.append(int(np.add.reduce(accepted)))
        log.drafted.append(num_drafted)
        log.waiting.append(self.num_waiting)
        log.first_tokens.append(sum([chunk.completes for chunk in plan.chunks]))
        return micros * 1e-6

    def finish(self, now: float) -> list[SimRequest]:
        """End the round under way; return the requests that ended with it."""
        started, self._round = self._round, None
        if started is None:
            return []
        ended: list[SimRequest] = []
        count = len(self._decoding)
        if count:
            if started.decision is not None and self._speculator is not None:
                self._speculator.learn(started.decision, started.accepted, started.draft_us, started.verify_us)
            state = self._state[:, :count]
            emitted = started.accepted + 1
            self._cached += count + self.log.accepted[-1]
            state[_POSITION] += emitted
            remaining = state[_REMAINING]
            remaining -= emitted
            for row in (remaining <= 0).nonzero()[0][::-1].tolist():
                ended.append(self._leave(row, now))
        joined = False
        for chunk in started.chunks:
            chunk.request.num_cached += chunk.length
            if chunk.completes:
                joined |= self._first_token(chunk.request, now, ended)
        if joined or ended:
            self._keys = [request.record.index for request in self._decoding]
        return ended

    def _decode(
        self, state: IntArray, caps: IntArray, token_budget: int, depth: int
    ) -> tuple[Decision | None, IntArray]:
        """Let the controller decide; return that and [R] drafts accepted of what it verifies."""
        state[_ROUNDS] += 1
        if self._speculator is None:
            return None, np.zeros(state.shape[1], np.int64)
        blocks = state[_BLOCK]
        decision = self._speculator.decide(self._keys, blocks, caps=caps, token_budget=token_budget, depth=depth)
        if not decision.num_drafted:
            return decision, decision.verify_len
        verify_len = decision.verify_len
        accepted = np.minimum(self._pool.accepted[blocks], verify_len)
        state[_VERIFIED] += verify_len
        state[_ACCEPTED] += accepted
        state[_BLOCK] = self._pool.following[blocks]
        return decision, accepted

    def _admit(self) -> None:
        """Hand waiting requests to the batcher while the server has a slot for them, as the engine loop does."""
        most = self.server.max_batch_size
        if self._speculator is not None:
            limits = self._speculator.controller.limits()
            most = min(most, most if limits.max_requests is None else limits.max_requests) if limits.admit else 0
        while self.num_running + len(self._batcher) < most:
            stream = self._queue.pop()
            if stream is None:
                return
            self._batcher.add(self._waiting.pop(stream.handle))

    def _caps(self, state: IntArray) -> tuple[IntArray, int]:
        """Return [R] most drafts of each decoding request, and their sum."""
        if self._speculator is None or not self._decoding:
            return _NOTHING, 0
        caps = np.minimum(state[_REMAINING] - 1, self._speculator.draft_len)
        return caps, int(np.add.reduce(caps))

    def _pass_us(
        self, count: int, drafts: int, num_drafted: int, depth: float, chunks: tuple[PromptChunk[SimRequest], ...]
    ) -> tuple[float | None, float, float]:
        """Return microseconds of drafting, of the target pass over decoding requests, and of prompt chunks beside it.

        A low clock stretches what a pass takes beyond reading the weights.
        """
        times, server = self._times, self.server
        prompt_tokens = sum([chunk.length for chunk in chunks])
        draft_us = self._stretched(times.draft_us(num_drafted, depth)) if num_drafted else None
        verify_us = prefill_us = 0.0
        if prompt_tokens and server.shared_prefill:
            verify_us = times.verify_us(count + len(chunks), count + drafts + prompt_tokens, depth)
        else:
            if count:
                verify_us = times.verify_us(count, count + drafts, depth)
            if prompt_tokens:
                start = sum([chunk.start for chunk in chunks]) / len(chunks)
                prefill_us = times.prefill_us(prompt_tokens, start)
        return draft_us, self._stretched(verify_us), self._stretched(prefill_us)

    def _stretched(self, micros: float) -> float:
        if self.stretch == 1:
            return micros
        return micros + max(0.0, micros - self._times.verify_us(1, 1, 0.0)) * (self.stretch - 1)

    def _first_token(self, request: SimRequest, now: float, ended: list[SimRequest]) -> bool:
        """Let a request whose prompt is cached emit its first token; return whether it decodes on."""
        self._prefilling.remove(request)
        record, arrival = request.record, request.arrival
        record.first_token_s = record.last_token_s = now
        record.output_tokens = 1
        # The server ends a request whose slot is full, with the reason `length`.
        remaining = min(arrival.output_tokens, self.server.max_seq_len - arrival.prompt_tokens) - 1
        if remaining <= 0:
            ended.append(request)
            return False
        row = len(self._decoding)
        self._decoding.append(request)
        block = self._pool.place(arrival.domain, self._generator)
        self._cached += arrival.prompt_tokens
        self._state[:, row] = (arrival.prompt_tokens, remaining, block, 0, 0, 0)
        return True

    def _leave(self, row: int, now: float) -> SimRequest:
        """Take a request out of its row; the last one moves there, as a slot table moves a request into a hole."""
        request, last = self._decoding[row], len(self._decoding) - 1
        values = self._state[:, row].tolist()
        self._state[:, row] = self._state[:, last]
        self._decoding[row] = self._decoding[last]
        self._decoding.pop()
        self._cached -= values[_POSITION]
        record = request.record
        record.last_token_s = now
        record.rounds, record.verified, record.accepted = values[_ROUNDS], values[_VERIFIED], values[_ACCEPTED]
        record.output_tokens = values[_POSITION] - request.num_prompt + 1
        if self._speculator is not None:
            self._speculator.controller.forget(record.index)
        return request


def _nowhere(message: object) -> None:
    """Take what the queue would send to a client; a simulated client is told by the record."""
