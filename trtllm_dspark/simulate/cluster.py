"""N replicas behind a router in simulated time: arrivals, rounds, faults, load samples and scaling, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_dspark.simulate.faults import Fault
from trtllm_dspark.simulate.node import Node
from trtllm_dspark.simulate.records import RequestRecord, RoundLog
from trtllm_dspark.simulate.replica import SimRequest
from trtllm_dspark.simulate.router import Router
from trtllm_dspark.simulate.scaling import Autoscaler
from trtllm_dspark.simulate.traffic import Arrival, Traffic

SAMPLE_S = 0.2
"""Seconds between readings of a device, as `load.LoadMonitor` takes them."""
HEALTH_S = 10.0
"""Seconds until a health check sees that a server is lost or back."""
RETRY_S = 1.0
"""Seconds after which a client sends a request again that a lost server failed."""
MAX_RETRIES = 30

Action = Callable[..., None]


@dataclass
class ClusterResult:
    """What a run left.

    Attributes:
        records: every request.
        logs: rounds by replica.
        replicas: (second, replicas that take requests) at every change.
        retries: requests sent again because their server was lost.
        last_arrival_s: when the last request was sent.
    """

    records: list[RequestRecord] = field(default_factory=list)
    logs: list[RoundLog] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)
    retries: int = 0
    last_arrival_s: float = 0.0


class Cluster:
    """Run one load over replicas.

    Args:
        make_node: number -> a new replica with its own load policy.
        replicas: how many serve from the start.
        router: who gets the next request.
        faults: what happens to which replica when.
        autoscaler: None = the number never changes.
        sampled: whether devices are read; without faults and load policies it only costs time.
        in_process: whether what is sent in an instant is there before a round begins in it, as requests of the same
            process are; over a network the next request of a user misses the round that follows the end of the last.
    """

    def __init__(
        self,
        make_node: Callable[[int], Node],
        *,
        replicas: int,
        router: Router,
        faults: Sequence[Fault] = (),
        autoscaler: Autoscaler | None = None,
        sampled: bool = False,
        in_process: bool = False,
    ) -> None:
        self._make_node = make_node
        self._router = router
        self._autoscaler = autoscaler
        self._sampled = sampled
        self._in_process = in_process
        self._due: set[int] = set()
        self._faults = faults
        self._nodes = [make_node(number) for number in range(replicas)]
        self._events: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._unfinished = 0
        self._backlog: list[Arrival] = []
        self._result = ClusterResult()

    def run(self, traffic: Traffic) -> ClusterResult:
        """Serve the whole load; every request ends."""
        self._unfinished = len(traffic.arrivals)
        result = self._result
        result.replicas.append((0.0, len(self._nodes)))
        if traffic.users is None:
            for index, arrival in enumerate(traffic.arrivals):
                self._at(arrival.time_s, self._arrive, index, arrival)
        else:
            self._backlog = list(reversed(traffic.arrivals))
            for _ in range(min(traffic.users, len(self._backlog))):
                self._next_of_user(0.0)
        for fault in self._faults:
            self._at(fault.at_s, self._fault, fault, True)
            self._at(fault.at_s + fault.for_s, self._fault, fault, False)
        if self._sampled:
            self._at(0.0, self._sample)
        if self._autoscaler is not None:
            self._at(self._autoscaler.period_s, self._scale, self._autoscaler)
        events = self._events
        while self._unfinished:
            now, _, action, arguments = heapq.heappop(events)
            action(now, *arguments)
        result.logs = [node.replica.log for node in self._nodes]
        return result

    def _at(self, time_s: float, action: Action, *arguments: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action, arguments))

    def _next_of_user(self, now: float) -> None:
        if self._backlog:
            arrival = self._backlog.pop()
            self._at(now, self._arrive, len(self._result.records), arrival)
            # Its number is taken now: several users may send in the same instant.
            self._result.records.append(_record(len(self._result.records), arrival, now))

    def _arrive(self, now: float, index: int, arrival: Arrival) -> None:
        records = self._result.records
        if index == len(records):
            records.append(_record(index, arrival, now))
        self._result.last_arrival_s = max(self._result.last_arrival_s, now)
        self._route(now, records[index], arrival, 0)

    def _route(self, now: float, record: RequestRecord, arrival: Arrival, tries: int) -> None:
        node = self._router.choose(self._nodes)
        if node is None or node.lost:
            self._retry(now, record, arrival, tries)
        elif node.replica.submit(arrival, record, now):
            node.tries[record.index] = tries
            self._go_on(now, node)
        else:
            self._end(now)

    def _retry(self, now: float, record: RequestRecord, arrival: Arrival, tries: int) -> None:
        if tries >= MAX_RETRIES:
            record.error = "engine_failed"
            self._end(now)
            return
        self._result.retries += 1
        self._at(now + RETRY_S, self._route, record, arrival, tries + 1)

    def _end(self, now: float) -> None:
        self._unfinished -= 1
        self._next_of_user(now)

    def _go_on(self, now: float, node: Node) -> None:
        if node.replica.busy or node.lost:
            return
        if not self._in_process:
            self._start(now, node)
        elif node.replica.number not in self._due:
            # Behind everything else of this instant.
            self._due.add(node.replica.number)
            self._at(now, self._start, node)

    def _start(self, now: float, node: Node) -> None:
        self._due.discard(node.replica.number)
        if node.replica.busy or node.lost:
            return
        seconds = node.replica.start(now)
        if seconds is not None:
            self._at(now + seconds, self._round_ends, node, node.epoch)

    def _round_ends(self, now: float, node: Node, epoch: int) -> None:
        if epoch != node.epoch:
            return
        for request in node.replica.finish(now):
            node.tries.pop(request.record.index, None)
            self._end(now)
        self._go_on(now, node)

    def _fault(self, now: float, fault: Fault, begins: bool) -> None:
        if fault.replica >= len(self._nodes):
            return
        node = self._nodes[fault.replica]
        if fault.kind == "throttle":
            node.set_clock(fault.clock if begins else 1.0)
        elif begins:
            self._at(now + HEALTH_S, self._checked, node)
            for request in node.lose():
                self._start_over(now, request, node.tries.pop(request.record.index, 0))
        else:
            node.lost = False
            self._at(now + HEALTH_S, self._checked, node)

    def _checked(self, now: float, node: Node) -> None:
        node.ready = not node.lost
        self._go_on(now, node)

    def _start_over(self, now: float, request: SimRequest, tries: int) -> None:
        record = request.record
        record.first_token_s = record.last_token_s = record.scheduled_s = None
        record.output_tokens = record.rounds = record.verified = record.accepted = 0
        self._retry(now, record, request.arrival, tries)

    def _sample(self, now: float) -> None:
        for node in self._nodes:
            node.sample(now)
            self._go_on(now, node)
        self._at(now + SAMPLE_S, self._sample)

    def _scale(self, now: float, scaler: Autoscaler) -> None:
        serving = [node for node in self._nodes if node.serving]
        coming = sum(1 for node in self._nodes if node.starting)
        wanted = scaler.wanted(now, serving)
        for _ in range(wanted - len(serving) - coming):
            node = self._make_node(len(self._nodes))
            node.starting = True
            self._nodes.append(node)
            self._at(now + scaler.startup_s, self._started, node)
        for node in serving[wanted:]:
            node.draining = True
        self._note(now)
        self._at(now + scaler.period_s, self._scale, scaler)

    def _started(self, now: float, node: Node) -> None:
        node.starting = False
        self._note(now)

    def _note(self, now: float) -> None:
        serving = sum(1 for node in self._nodes if node.serving)
        if self._result.replicas[-1][1] != serving:
            self._result.replicas.append((now, serving))


def _record(index: int, arrival: Arrival, now: float) -> RequestRecord:
    return RequestRecord(index, arrival.domain, now, arrival.prompt_tokens)
