"""The loop that owns the session: admit, step, publish; between rounds it acts on cancellations and deadlines."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trtllm_dspark.engine_process.gauges import Gauges
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.publisher import Publisher
from trtllm_dspark.engine_process.queue import RequestQueue
from trtllm_dspark.engine_process.requests import GenerationRequest
from trtllm_dspark.engine_process.streams import Stream, StreamState
from trtllm_dspark.errors import DeviceError, RequestError

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5


class SessionLike(Protocol):
    """The part of `runtime.Session` the loop uses."""

    def add(self, request: Any) -> None:
        """Admit one request."""
        ...

    def cancel(self, request_id: str) -> Any:
        """Free the request's slot."""
        ...

    def step(self) -> Sequence[Any]:
        """Run one round and return one output a request."""
        ...

    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        ...

    @property
    def failure(self) -> DeviceError | None:
        """Why the session takes no more requests."""
        ...


class EngineLoop:
    """Run a session for many clients.

    Args:
        session: what generates; only the thread that calls `run` touches it.
        make_request: (session id, validated request) -> the session's own request type.
        num_slots: requests the session runs at once; the rest waits here, in priority order.
        queue: the waiting room.
        metrics: where everything is counted.
        token_text: text of one token, for requests that want it.
    """

    def __init__(
        self,
        session: SessionLike,
        make_request: Callable[[str, GenerationRequest], Any],
        *,
        num_slots: int,
        queue: RequestQueue,
        metrics: EngineMetrics,
        token_text: Callable[[int], str] = str,
    ) -> None:
        self._session = session
        self._make_request = make_request
        self._num_slots = num_slots
        self._queue = queue
        self._metrics = metrics
        self._gauges = Gauges(metrics, num_slots)
        self._publisher = Publisher(metrics, token_text)
        self._running: dict[str, Stream] = {}
        self._deadlines: list[tuple[float, int, Stream]] = []
        self._sequence = itertools.count()
        self._inbox: deque[tuple[str, Stream]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self.rounds = 0
        self.last_progress = time.monotonic()

    # Called from other threads.

    def submit(self, stream: Stream) -> None:
        """Hand over a validated request."""
        self._post("add", stream)

    def cancel(self, stream: Stream, reason: str) -> None:
        """End a request before the next round; harmless when it has finished."""
        stream.cancel_reason = reason
        self._post("cancel", stream)

    def request_stop(self) -> None:
        """Let waiting and running requests finish, then end `run`; new ones are refused.

        Safe in a signal handler: it takes no lock, so an idle loop sees it after its idle wait at the latest.
        """
        self._stopping = True

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests in the session."""
        return len(self._running)

    # The loop's own thread.

    def run(self) -> None:
        """Serve until `request_stop`; an exception of the session is raised after every open stream got an error."""
        try:
            while True:
                self._take_inbox()
                self._expire(time.monotonic())
                self._admit()
                if self._running or self._session.has_unfinished():
                    self._round()
                elif self._stopping and not self._inbox and not len(self._queue):
                    return
                else:
                    self._update_gauges()
                    self._sleep()
        except BaseException:
            self._fail_everything()
            raise

    def _post(self, kind: str, stream: Stream) -> None:
        with self._wake:
            self._inbox.append((kind, stream))
            self._wake.notify()

    def _sleep(self) -> None:
        with self._wake:
            if not self._inbox and not self._stopping:
                timeout = _IDLE_WAIT_S
                if self._deadlines:
                    timeout = min(timeout, max(0.0, self._deadlines[0][0] - time.monotonic()))
                self._wake.wait(timeout)
        self.last_progress = time.monotonic()

    def _take_inbox(self) -> None:
        while self._inbox:
            kind, stream = self._inbox.popleft()
            if stream.cancel_reason is not None:
                self._end(stream, stream.cancel_reason)
            elif kind == "add":
                self._enqueue(stream)

    def _enqueue(self, stream: Stream) -> None:
        request = stream.request
        if request is None or stream.state is StreamState.DONE:
            return
        try:
            if self._stopping:
                raise RequestError("the server is shutting down; send the request elsewhere", code="shutting_down")
            self._queue.push(stream, priority=request.priority, num_free=self._num_slots - len(self._running))
        except RequestError as error:
            self._metrics.add("dspark_requests_rejected", reason=error.code)
            stream.fail(error.code, str(error))
            return
        if stream.deadline is not None:
            heapq.heappush(self._deadlines, (stream.deadline, next(self._sequence), stream))
            self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        """Drop finished requests when they are most of the heap: a deadline may be weeks away."""
        if len(self._deadlines) > 64 + 2 * (len(self._queue) + len(self._running)):
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not StreamState.DONE]
            heapq.heapify(self._deadlines)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            stream = heapq.heappop(self._deadlines)[2]
            if stream.state is not StreamState.DONE:
                self._end(stream, "deadline")

    def _admit(self) -> None:
        while len(self._running) < self._num_slots:
            stream = self._queue.pop()
            if stream is None or stream.request is None:
                return
            try:
                self._session.add(self._make_request(stream.session_id, stream.request))
            except RequestError as error:
                self._metrics.add("dspark_requests_rejected", reason=error.code)
                stream.fail(error.code, str(error))
                continue
            stream.state = StreamState.RUNNING
            stream.scheduled_at = time.monotonic()
            self._running[stream.session_id] = stream
            self._metrics.observe("dspark_queue_seconds", stream.scheduled_at - stream.arrival)
            self._metrics.add("dspark_input_tokens", len(stream.request.prompt_token_ids))
            self._metrics.observe("nv_llm_input_token_len", len(stream.request.prompt_token_ids))

    def _round(self) -> None:
        started = time.monotonic()
        outputs = self._session.step()
        now = time.monotonic()
        self.last_progress = now
        self.rounds += 1
        self._metrics.add("dspark_rounds")
        self._metrics.observe("dspark_round_seconds", now - started)
        pairs = []
        for output in outputs:
            stream = self._running.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._running[output.request_id]
            pairs.append((stream, output))
        self._publisher.publish(pairs, now)
        self._update_gauges()
        if self._session.failure is not None:
            raise DeviceError(f"the engine failed: {self._session.failure}")

    def _end(self, stream: Stream, reason: str) -> None:
        """Take a request out wherever it is and tell its client why."""
        if stream.state is StreamState.DONE:
            return
        if stream.state is StreamState.WAITING:
            self._queue.discard(stream)
        elif stream.state is StreamState.RUNNING:
            del self._running[stream.session_id]
            self._session.cancel(stream.session_id)
        self._publisher.end(stream, reason)

    def _fail_everything(self) -> None:
        logger.error("the engine failed; every open request gets an error")
        while (stream := self._queue.pop()) is not None:
            self._running[stream.session_id] = stream
        while self._inbox:
            kind, stream = self._inbox.popleft()
            if kind == "add":
                self._running[stream.session_id] = stream
        for stream in self._running.values():
            self._metrics.add("dspark_requests_failed", reason="engine_failure")
            stream.fail("engine_failure", "the engine failed while running this request; retry it")
        self._running.clear()

    def _update_gauges(self) -> None:
        self._gauges.update(waiting=len(self._queue), running=tuple(self._running.values()), rounds=self.rounds)
