"""The loop that owns the session: admit, step, publish; between rounds it acts on cancellations and deadlines."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from trtllm_dspark.engine_process.gauges import Gauges
from trtllm_dspark.engine_process.lanes import Lane, LaneSet
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.publisher import STOPPED, Publisher
from trtllm_dspark.engine_process.queue import RequestQueue
from trtllm_dspark.engine_process.requests import GenerationRequest
from trtllm_dspark.engine_process.speculation_metrics import SpeculationMetrics
from trtllm_dspark.engine_process.streams import Stream, StreamState
from trtllm_dspark.errors import DeviceError, RequestError

if TYPE_CHECKING:
    from trtllm_dspark.engine_process.swap import DrafterSwap
    from trtllm_dspark.runtime.load_control import LoadControl

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
_SHUTTING_DOWN = "the server is shutting down; send the request elsewhere"


class EngineLoop:
    """Run a session for many clients.

    Args:
        lane: the session that generates at first; what finds no slot waits here, in priority order.
        queue: the waiting room.
        metrics: where everything is counted.
        token_text: text of one token, for requests that want it.
        load: what limits the sessions, for the metrics; None where nothing does.

    Attributes:
        lanes: the sessions; a drafter swap puts a second one beside the first.
        swap: told of finished requests and polled between rounds, where there is one.
    """

    def __init__(
        self,
        lane: Lane,
        *,
        queue: RequestQueue,
        metrics: EngineMetrics,
        token_text: Callable[[int], str] = str,
        load: LoadControl | None = None,
    ) -> None:
        self.lanes = LaneSet(lane)
        self.swap: DrafterSwap | None = None
        self._queue = queue
        self._metrics = metrics
        self._gauges = Gauges(metrics, lane.num_slots)
        self._speculation = SpeculationMetrics(metrics, load)
        self._publisher = Publisher(metrics, token_text)
        self._deadlines: list[tuple[float, int, Stream]] = []
        self._sequence = itertools.count()
        self._inbox: deque[tuple[str, Stream]] = deque()
        self._wake = threading.Condition()
        self._woken = False
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

    def wake(self) -> None:
        """Make an idle loop look around."""
        with self._wake:
            self._woken = True
            self._wake.notify()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests in the session."""
        return self.lanes.num_running

    # The loop's own thread.

    def run(self) -> None:
        """Serve until `request_stop`; an exception of the session is raised after every open stream got an error."""
        try:
            while True:
                self._take_inbox()
                self._expire(time.monotonic())
                if self.swap is not None:
                    self.swap.poll()
                self._admit()
                if any([self._round(lane) for lane in tuple(self.lanes) if lane.busy]):
                    continue
                # Nobody is there, or the load of the device lets nobody start.
                if not self._stopping or self._inbox:
                    self._update_gauges()
                    self._sleep()
                elif not self._refuse_held_back():
                    return
        except BaseException:
            self._fail_everything()
            raise

    def _post(self, kind: str, stream: Stream) -> None:
        with self._wake:
            self._inbox.append((kind, stream))
            self._wake.notify()

    def _sleep(self) -> None:
        with self._wake:
            if not self._inbox and not self._stopping and not self._woken:
                timeout = _IDLE_WAIT_S
                if self._deadlines:
                    timeout = min(timeout, max(0.0, self._deadlines[0][0] - time.monotonic()))
                self._wake.wait(timeout)
            self._woken = False
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
                raise RequestError(_SHUTTING_DOWN, code="shutting_down")
            self._queue.push(stream, priority=request.priority, num_free=self.lanes.num_free)
        except RequestError as error:
            self._metrics.add("dspark_requests_rejected", reason=error.code)
            stream.fail(error.code, str(error))
            return
        if stream.deadline is not None:
            heapq.heappush(self._deadlines, (stream.deadline, next(self._sequence), stream))
            self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        """Drop finished requests when they are most of the heap: a deadline may be weeks away."""
        if len(self._deadlines) > 64 + 2 * (len(self._queue) + self.lanes.num_running):
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not StreamState.DONE]
            heapq.heapify(self._deadlines)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            stream = heapq.heappop(self._deadlines)[2]
            if stream.state is not StreamState.DONE:
                self._end(stream, "deadline")

    def _admit(self) -> None:
        while (lane := self.lanes.choose()) is not None:
            stream = self._queue.pop()
            if stream is None or stream.request is None:
                return
            started = self._start(lane, stream, stream.request)
            if started is None:
                continue
            lane = started
            stream.state = StreamState.RUNNING
            stream.scheduled_at = time.monotonic()
            lane.running[stream.session_id] = stream
            self._metrics.observe("dspark_queue_seconds", stream.scheduled_at - stream.arrival)
            self._metrics.add("dspark_input_tokens", len(stream.request.prompt_token_ids))
            self._metrics.observe("nv_llm_input_token_len", len(stream.request.prompt_token_ids))

    def _start(self, lane: Lane, stream: Stream, request: GenerationRequest) -> Lane | None:
        """Give a request to a lane; return the one that took it, or None where its client was told why none did."""
        try:
            lane.session.add(lane.make_request(stream.session_id, request))
            return lane
        except DeviceError:
            raise
        except RequestError as error:
            if lane is not self.lanes.serving:
                # Its client cannot know of a candidate: only the lane that serves may refuse it.
                return self._start(self.lanes.serving, stream, request)
            self._metrics.add("dspark_requests_rejected", reason=error.code)
            stream.fail(error.code, str(error))
        except Exception:
            # The session has not taken it, so the others go on.
            logger.exception("a request could not be started")
            self._metrics.add("dspark_requests_failed", reason="request_failure")
            stream.fail("engine_failure", "the engine could not start this request; its log says why")
        return None

    def _round(self, lane: Lane) -> bool:
        """Run a round and publish what came of it; return whether anything did."""
        started = time.monotonic()
        outputs = lane.session.step()
        now = time.monotonic()
        self.last_progress = now
        computed = not lane.session.held_back
        if computed:
            self.rounds += 1
            self._metrics.add("dspark_rounds")
            self._metrics.observe("dspark_round_seconds", now - started)
        pairs = []
        for output in outputs:
            stream = lane.running.get(output.request_id) or lane.ending.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                lane.running.pop(output.request_id, None)
                lane.ending.pop(output.request_id, None)
            if output.finish_reason == "error" and self._start_elsewhere(lane, stream):
                continue
            pairs.append((stream, output))
        self._publisher.publish(pairs, now)
        if self.swap is not None:
            for _, output in pairs:
                if output.finish_reason in ("stop", "length"):
                    self.swap.finished(lane, output.stats.acceptance)
        self._update_gauges()
        if lane.session.failure is not None:
            if lane is self.lanes.serving or self.swap is None:
                raise DeviceError(f"the engine failed: {lane.session.failure}")
            self.swap.lane_failed(lane)
        return computed or bool(outputs)

    def _start_elsewhere(self, lane: Lane, stream: Stream) -> bool:
        """Put a request of a failed candidate that has answered nothing back into the queue; return whether it was."""
        if lane is self.lanes.serving or lane.session.failure is None or stream.num_output_tokens or not stream.request:
            return False
        if stream.state is StreamState.ENDING:  # nobody wants it any more
            return False
        self._queue.push(stream, priority=stream.request.priority, num_free=self.lanes.num_slots)
        return True

    def _end(self, stream: Stream, reason: str) -> None:
        """Take a request out wherever it is and tell its client why."""
        if stream.state is StreamState.DONE:
            stream.release()  # the intake may have read it since
            return
        if stream.state is StreamState.ENDING:
            return
        if stream.state is StreamState.WAITING:
            self._queue.discard(stream)
        elif stream.state is StreamState.RUNNING:
            lane = self.lanes.lane_of(stream)
            del lane.running[stream.session_id]
            known = lane.session.cancel(stream.session_id)
            if reason == STOPPED and known:
                # Text that might have become a stop string comes with the session's last output.
                stream.state = StreamState.ENDING
                lane.ending[stream.session_id] = stream
                return
        self._publisher.end(stream, reason)

    def _refuse_held_back(self) -> int:
        """Tell everybody who waits for the load to fall that the server shuts down; return how many they were."""
        streams = list(self.lanes.running())
        for stream in streams:
            lane = self.lanes.lane_of(stream)
            del lane.running[stream.session_id]
            lane.session.cancel(stream.session_id)
        while (waiting := self._queue.pop()) is not None:
            streams.append(waiting)
        for stream in streams:
            self._metrics.add("dspark_requests_rejected", reason="shutting_down")
            stream.fail("shutting_down", _SHUTTING_DOWN)
        return len(streams)

    def _fail_everything(self) -> None:
        logger.error("the engine failed; every open request gets an error")
        streams = [*self.lanes.running(), *(stream for lane in self.lanes for stream in lane.ending.values())]
        while (stream := self._queue.pop()) is not None:
            streams.append(stream)
        while self._inbox:
            kind, stream = self._inbox.popleft()
            if kind == "add":
                streams.append(stream)
        for stream in streams:
            self._metrics.add("dspark_requests_failed", reason="engine_failure")
            stream.fail("engine_failure", "the engine failed while running this request; retry it")
        for lane in self.lanes:
            lane.running.clear()
            lane.ending.clear()

    def _update_gauges(self) -> None:
        self._gauges.num_slots = self.lanes.num_slots
        self._gauges.update(waiting=len(self._queue), running=self.lanes.running(), rounds=self.rounds)
        self._speculation.update([lane.session for lane in self.lanes])
