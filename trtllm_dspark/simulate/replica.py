"""One server in simulated time: the serving code's queue, batcher and schedules around an engine made of numbers.

A round follows `runtime.Session` step by step. What differs: tokens have no values, passes take what the cost table
says, and whether drafts are accepted was drawn beforehand. Like the server it never preempts: a request holds one slot,
whose memory is `max_seq_len` tokens, from admission to its end; the others wait.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
from trtllm_dspark.speculation.controller import LoadLimits
from trtllm_dspark.speculation.shares import FairShares

T = TypeVar("T")

_UNLIMITED = LoadLimits()


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request inside a replica: what `runtime.batcher` asks of one, and its record."""

    arrival: Arrival
    record: RequestRecord
    num_cached: int = 0
    num_waiting: int = 0
    """Tokens of its prompt that the drafter's context has not absorbed."""

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return self.arrival.prompt_tokens


@dataclass(slots=True)
class _Started:
    """A round under way.

    Attributes:
        chunks: prompt chunks it prefills.
        accepted: [R] drafts accepted of every decoding request; None where there are none.
        last: rows of decoding requests that end with it, ascending.
        decision: what the controller decided, or None where nothing speculates.
        draft_us: microseconds of drafting, or None.
        verify_us: microseconds of the target pass over decoding requests, or None; both None where nobody compares.
    """

    chunks: tuple[PromptChunk[SimRequest], ...]
    accepted: IntArray | None
    last: Sequence[int]
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
        most = server.max_num_tokens + server.max_batch_size
        self._times = EngineTimes(server.table_of(policy), max_tokens=most, by_row=not server.estimated)
        self._queue = RequestQueue(max_waiting=server.max_queue_size)
        self._waiting: dict[int, SimRequest] = {}
        self._batcher: Batcher[SimRequest] = Batcher(server.max_num_tokens)
        self._prefilling: list[SimRequest] = []
        self._decoding: list[SimRequest] = []
        self._keys: list[Hashable] = []
        self._cached = 0
        self._draft_len = 0 if speculator is None else speculator.draft_len
        self._shares = FairShares(self._draft_len)
        self._interactive = np.ones(server.max_batch_size, np.bool_)
        # What never drafts keeps no context, and another drafter's is not known. What adapts lets tokens wait for a
        # draft, up to those of a pass.
        self._absorb_us = server.absorb_us if self._draft_len and not policy.drafter else 0.0
        adapts = speculator is not None and speculator.controller.adapts
        self._most_waiting = server.max_num_tokens if adapts else 1
        self._rows = pool.rows(most_waiting=self._most_waiting)
        self._round: _Started | None = None

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting) + len(self._batcher)

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
            request.num_cached = request.num_waiting = 0
            if self._speculator is not None:
                self._speculator.controller.forget(request.record.index)
        self._queue = RequestQueue(max_waiting=self.server.max_queue_size)
        self._batcher = Batcher(self.server.max_num_tokens)
        self._waiting.clear()
        self._decoding.clear()
        self._rows.clear()
        self._prefilling.clear()
        self._keys, self._cached, self._round = [], 0, None
        return lost

    def start(self, now: float) -> float | None:
        """Start a round; return its seconds, or None when there is nothing to do."""
        limits = _UNLIMITED if self._speculator is None else self._speculator.controller.limits()
        self._admit(limits)
        count = len(self._decoding)
        # Drafts are counted as a session does: by the number of requests, not by what they may verify.
        plan = self._batcher.plan(
            num_decoding=count,
            drafts_wanted=count * self._draft_len,
            prefilling=self._prefilling,
            num_free=max(0, self._most(limits) - self.num_running),
        )
        for request in plan.admitted:
            request.record.scheduled_s = now
            self._prefilling.append(request)
        chunks = plan.chunks
        if not count and not chunks:
            return None
        depth = self._cached / count if count else 0.0
        decision, accepted = None, None
        drafts = num_drafted = num_accepted = backlog = 0
        whole = True
        last: list[int] = []
        if count:
            if self._speculator is not None:
                decision, whole = self._decide(self._speculator, limits, plan.draft_budget, int(depth))
                num_drafted = decision.num_drafted
            verify_len = drafting = None
            if decision is not None and num_drafted:
                verify_len = decision.verify_len
                drafting = decision.plan.caps if self._absorb_us else None
            # Nobody looks at the rows before the round ends.
            accepted, drafts, num_accepted, last, backlog = self._rows.advance(verify_len, drafting)
        draft_us, verify_us, prefill_us = self._pass_us(decision, drafts, depth, chunks)
        verify_us += 0.0 if whole else self.server.ragged_us
        server = self.server
        host_us = server.host_us + server.host_request_us * count + server.host_token_us * (count + drafts)
        micros = (draft_us or 0.0) + verify_us + prefill_us + host_us
        if self._absorb_us:
            # Beside the draft's time, which the controller learns by; a session times up to gamma + 1 tokens with that.
            micros += self._absorb_us * (backlog + self._take_prompts(chunks)) * self.stretch
        # A pass that takes what the table says teaches nothing, one that prompts share cannot be compared.
        told = self.timed and not (chunks and self.server.shared_prefill)
        self._round = _Started(
            chunks, accepted, last, decision, draft_us if self.timed else None, verify_us if told else None
        )
        log = self.log
        log.start_s.append(now)
        log.duration_us.append(micros)
        log.num_requests.append(count)
        log.drafts.append(drafts)
        log.accepted.append(num_accepted)
        log.drafted.append(num_drafted)
        log.waiting.append(self.num_waiting)
        log.first_tokens.append(sum([chunk.completes for chunk in chunks]) if chunks else 0)
        return micros * 1e-6

    def finish(self, now: float) -> list[SimRequest]:
        """End the round under way; return the requests that ended with it."""
        started, self._round = self._round, None
        if started is None:
            return []
        ended: list[SimRequest] = []
        if started.accepted is not None:
            if started.decision is not None and self._speculator is not None:
                self._speculator.learn(started.decision, started.accepted, started.draft_us, started.verify_us)
            self._cached += len(self._decoding) + self.log.accepted[-1]
        if started.chunks or started.last:
            # The controller may keep the keys of a past round.
            self._keys = self._keys.copy()
        for chunk in started.chunks:
            chunk.request.num_cached += chunk.length
            if chunk.completes:
                self._first_token(chunk.request, now, ended)
        # The last rows move into the holes, those that have just joined first, as in a session's slot table.
        for row in reversed(started.last):
            ended.append(self._leave(row, now))
        return ended

    def _take_prompts(self, chunks: tuple[PromptChunk[SimRequest], ...]) -> int:
        """Note the tokens of prompt chunks; return how many of them do not wait for a draft."""
        absorbed = 0
        for chunk in chunks:
            request = chunk.request
            request.num_waiting += chunk.length
            if request.num_waiting >= self._most_waiting:
                absorbed += request.num_waiting
                request.num_waiting = 0
        return absorbed

    def _decide(
        self, speculator: Speculator, limits: LoadLimits, draft_budget: int, depth: int
    ) -> tuple[Decision, bool]:
        """Let the controller decide; return that, and whether every request verifies all it may."""
        most = self._rows.caps(self._draft_len)
        budget = draft_budget if limits.verify_budget is None else min(draft_budget, limits.verify_budget)
        caps = self._shares.limit(most, self._interactive[: len(most)], budget)
        decision = speculator.decide(self._keys, self._rows, caps=caps, token_budget=draft_budget, depth=depth)
        # Only where ragged passes take longer does anybody ask.
        whole = not (self.server.ragged_us and decision.num_drafted) or np.array_equal(decision.verify_len, most)
        return decision, whole

    def _most(self, limits: LoadLimits) -> int:
        """Return how many requests may run."""
        most = self.server.max_batch_size
        if not limits.admit:
            return 0
        return most if limits.max_requests is None else min(most, limits.max_requests)

    def _admit(self, limits: LoadLimits) -> None:
        """Hand waiting requests to the batcher while the server has a slot for them, as the engine loop does."""
        if not self._waiting:
            return
        most = self._most(limits)
        while self.num_running + len(self._batcher) < most:
            stream = self._queue.pop()
            if stream is None:
                return
            self._batcher.add(self._waiting.pop(stream.handle))

    def _pass_us(
        self, decision: Decision | None, drafts: int, depth: float, chunks: tuple[PromptChunk[SimRequest], ...]
    ) -> tuple[float | None, float, float]:
        """Return microseconds of drafting, of the target pass over decoding requests, and of prompt chunks beside it.

        A low clock stretches what a pass takes beyond reading the weights.
        """
        count, longest = len(self._decoding), 1
        times, server = self._times, self.server
        num_rows = 0 if decision is None else decision.num_rows
        if decision is not None and drafts and times.by_row:
            longest += int(decision.verify_len.max())
        prompt_tokens = sum([chunk.length for chunk in chunks]) if chunks else 0
        draft_us = times.draft_us(num_rows, depth) if num_rows else None
        verify_us = prefill_us = 0.0
        if prompt_tokens and server.shared_prefill:
            verify_us = times.verify_us(count + len(chunks), count + drafts + prompt_tokens, depth)
        else:
            if count:
                verify_us = times.verify_us(count, count + drafts, depth, longest)
            if prompt_tokens and server.prefill_us is not None:
                prefill_us = server.prefill_us[0] + server.prefill_us[1] * prompt_tokens
            elif prompt_tokens:
                start = sum([chunk.start for chunk in chunks]) / len(chunks)
                prefill_us = times.prefill_us(prompt_tokens, start)
        if self.stretch == 1:
            return draft_us, verify_us, prefill_us
        stretched_us = None if draft_us is None else self._stretched(draft_us)
        return stretched_us, self._stretched(verify_us), self._stretched(prefill_us)

    def _stretched(self, micros: float) -> float:
        return micros + max(0.0, micros - self._times.verify_us(1, 1, 0.0)) * (self.stretch - 1)

    def _first_token(self, request: SimRequest, now: float, ended: list[SimRequest]) -> None:
        """Let a request whose prompt is cached emit its first token, which may be its last."""
        self._prefilling.remove(request)
        record, arrival = request.record, request.arrival
        record.first_token_s = record.last_token_s = now
        record.output_tokens = 1
        # The server ends a request whose slot is full, with the reason `length`.
        remaining = min(arrival.output_tokens, self.server.max_seq_len - arrival.prompt_tokens) - 1
        if remaining <= 0:
            ended.append(request)
            return
        self._rows.join(self._pool.place(arrival.domain, self._generator), remaining, request.num_waiting)
        self._decoding.append(request)
        self._keys.append(record.index)
        self._cached += arrival.prompt_tokens

    def _leave(self, row: int, now: float) -> SimRequest:
        """Take a request out of its row; the last one moves there."""
        rounds, emitted, verified = self._rows.leave(row)
        request = _take(self._decoding, row)
        _take(self._keys, row)
        self._cached -= request.num_prompt + emitted
        record = request.record
        record.last_token_s = now
        # Every round it took part in emitted one token and the drafts accepted in it.
        record.rounds, record.verified, record.accepted = rounds, verified, emitted - rounds
        record.output_tokens = emitted + 1
        if self._speculator is not None:
            self._speculator.controller.forget(record.index)
        return request


def _take(rows: list[T], row: int) -> T:
    """Take one out of a list; the last moves there."""
    taken, rows[row] = rows[row], rows[-1]
    rows.pop()
    return taken


def _nowhere(message: object) -> None:
    """Take what the queue would send to a client; a simulated client is told by the record."""
