"""The waiting room: bound, order, ageing, discarding."""

from __future__ import annotations

import pytest

from trtllm_dspark.engine_process.queue import RequestQueue
from trtllm_dspark.engine_process.streams import Stream, StreamState
from trtllm_dspark.errors import RequestError


def stream(name: str, arrival: float = 0.0) -> Stream:
    return Stream(send=lambda message: None, connection_id=1, handle=1, session_id=name, request_id="", arrival=arrival)


def names(queue: RequestQueue) -> list[str]:
    out = []
    while (popped := queue.pop()) is not None:
        out.append(popped.session_id)
    return out


def test_pop_is_first_come_first_served_within_a_priority() -> None:
    queue = RequestQueue(max_waiting=10)
    for name in "abc":
        queue.push(stream(name, arrival=1.0))
    assert names(queue) == ["a", "b", "c"]


def test_pop_urgent_first_but_ageing_prevents_starvation() -> None:
    queue = RequestQueue(max_waiting=10, ageing_s=2.0)
    queue.push(stream("old, not urgent", arrival=0.0), priority=10)  # goes as if it had come at 18
    queue.push(stream("new, urgent", arrival=17.0), priority=1)
    queue.push(stream("newer, urgent", arrival=19.0), priority=1)
    assert names(queue) == ["new, urgent", "old, not urgent", "newer, urgent"]


def test_push_beyond_the_limit_is_queue_full_and_discard_makes_room() -> None:
    queue = RequestQueue(max_waiting=2)
    first = stream("a")
    queue.push(first)
    queue.push(stream("b"))
    with pytest.raises(RequestError) as full:
        queue.push(stream("c"))
    assert full.value.code == "queue_full"
    queue.discard(first)
    queue.discard(first)  # twice is harmless
    assert first.state is StreamState.DONE
    queue.push(stream("d"))
    assert len(queue) == 2
    assert names(queue) == ["b", "d"]


def test_discard_of_many_does_not_keep_them() -> None:
    queue = RequestQueue(max_waiting=1000)
    streams = [stream(str(index)) for index in range(500)]
    for item in streams:
        queue.push(item)
    for item in streams[:-1]:
        queue.discard(item)
    assert len(queue._heap) < 250
    assert names(queue) == ["499"]
