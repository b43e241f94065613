"""How requests leave the loop: stopped, refused, held back by the load, and what is kept of them."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from helpers.fake_engine import FakeEngine, greedy
from helpers.loop_bench import LoopBench

from trtllm_dspark.engine_process.lanes import Lane
from trtllm_dspark.engine_process.requests import GenerationRequest
from trtllm_dspark.engine_process.session_request import make_session_request
from trtllm_dspark.engine_process.streams import Stream, StreamState
from trtllm_dspark.errors import DeviceError, RequestError
from trtllm_dspark.runtime import Session
from trtllm_dspark.speculation.controller import LoadLimits


class Letters:
    """A tokenizer for which every token is the same text."""

    eos_token_ids = ()

    def __init__(self, text: str) -> None:
        self._text = text

    def detokenizer(self) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return self._text


class Load:
    """The load of the device, as the test says."""

    def __init__(self, *, admit: bool) -> None:
        self.admit = admit

    def limits(self) -> LoadLimits:
        return LoadLimits(admit=self.admit)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(bench: LoopBench) -> threading.Thread:
    thread = threading.Thread(target=bench.loop.run, daemon=True)
    thread.start()
    return thread


# Stopped by id.


@pytest.mark.parametrize("stream", [True, False])
def test_stopped_request_gets_the_text_that_might_have_become_a_stop_string(stream: bool) -> None:
    bench = LoopBench(tokenizer=Letters("a<"))
    stopped = bench.submit([1], stop=("<end>",), stream=stream)
    items = [item for _ in range(3) for item in bench.round()]
    bench.loop.cancel(stopped, "stop_request")
    items += bench.round()
    tokens = [token for item in items for token in item["tokens"]]
    assert tokens == greedy([1], len(tokens))
    assert len(tokens) >= 3
    assert "".join(item["text"] for item in items) == "a<" * len(tokens)
    assert [item.get("finish_reason") for item in items[-1:]] == ["cancelled"]
    assert items[-1]["stats"]["num_prompt_tokens"] == 1
    assert stopped.state is StreamState.DONE
    series = bench.metrics.snapshot()
    assert series["dspark_requests_cancelled"]["reason=stop_request"] == 1.0
    assert "reason=cancelled" not in series["dspark_requests_finished"]


def test_stopped_request_that_also_loses_its_client_or_its_time_ends_once() -> None:
    bench = LoopBench(tokenizer=Letters("a<"))
    stopped = bench.submit([1], stop=("<end>",))
    bench.round()
    bench.loop.cancel(stopped, "stop_request")
    bench.loop._take_inbox()
    bench.loop.cancel(stopped, "disconnected")
    bench.loop._take_inbox()
    bench.loop._end(stopped, "deadline")
    items = [*bench.round(), *bench.round()]
    assert [item.get("finish_reason") for item in items] == ["cancelled"]
    assert not bench.session.has_unfinished()


def test_stopped_request_of_an_engine_that_fails_at_once_is_told() -> None:
    bench = LoopBench(FakeEngine(max_seq_len=400, fail_after=3))
    stopped = bench.submit([1])
    bench.submit([2])
    bench.round()
    bench.round()
    bench.loop.cancel(stopped, "stop_request")
    with pytest.raises(DeviceError, match="planted failure"):
        bench.loop.run()
    final = {item["id"]: item for item in bench.items() if "finish_reason" in item or "code" in item}
    assert final[1]["finish_reason"] == "cancelled"
    assert final[2]["code"] == "engine_failure"


# Held back by the load.


def test_stop_with_closed_admission_tells_who_waits_and_ends() -> None:
    bench = LoopBench()
    bench.loop.lanes.serving.request_limit = lambda: 0
    for first in range(3):
        bench.submit([first])
    thread = run(bench)
    wait_for(lambda: bench.loop.num_waiting == 3)
    bench.loop.request_stop()
    thread.join(10.0)
    assert not thread.is_alive()
    assert {item["id"]: item["code"] for item in bench.items()} == dict.fromkeys((1, 2, 3), "shutting_down")
    assert bench.metrics.snapshot()["dspark_requests_rejected"]["reason=shutting_down"] == 3.0


def test_stop_tells_requests_that_the_session_itself_holds_back() -> None:
    bench = LoopBench(load=Load(admit=False))
    bench.submit([1])
    thread = run(bench)
    wait_for(lambda: bench.loop.num_running == 1)
    bench.loop.request_stop()
    thread.join(10.0)
    assert not thread.is_alive()
    assert [item["code"] for item in bench.items()] == ["shutting_down"]
    assert not bench.session.has_unfinished()


def test_stop_lets_running_requests_finish_before_it_refuses_waiting_ones() -> None:
    bench = LoopBench()
    bench.loop.lanes.serving.request_limit = lambda: 1
    for first in range(2):
        bench.submit([first], max_tokens=12)
    bench.round()
    bench.loop.lanes.serving.request_limit = lambda: 0
    bench.loop.request_stop()
    thread = run(bench)
    thread.join(10.0)
    assert not thread.is_alive()
    final = {item["id"]: item for item in bench.items() if "finish_reason" in item or "code" in item}
    assert final[1]["finish_reason"] == "length"
    assert final[2]["code"] == "shutting_down"


def test_limit_that_drops_behind_an_admission_costs_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop asked before the limit fell, the session behind it."""
    load = Load(admit=False)
    bench = LoopBench(load=load)
    steps: list[float] = []
    step = bench.session.step
    monkeypatch.setattr(bench.session, "step", lambda: (steps.append(time.monotonic()), step())[1])
    bench.submit([1], max_tokens=6)
    thread = run(bench)
    wait_for(lambda: bool(steps))
    time.sleep(0.3)
    assert len(steps) <= 3
    assert bench.loop.rounds == 0
    assert "dspark_rounds" not in {name for name, series in bench.metrics.snapshot().items() if any(series.values())}
    assert time.monotonic() - bench.loop.last_progress < 2.0  # idle, not hung
    load.admit = True
    wait_for(lambda: any("finish_reason" in item for item in bench.items()))
    assert sum((item["tokens"] for item in bench.items()), []) == greedy([1], 6)
    assert bench.loop.rounds > 0
    bench.loop.request_stop()
    thread.join(10.0)
    assert not thread.is_alive()


def test_held_back_request_can_be_cancelled_and_misses_its_deadline() -> None:
    bench = LoopBench(load=Load(admit=False))
    bench.submit([1], timeout_s=0.2)
    cancelled = bench.submit([2])
    thread = run(bench)
    wait_for(lambda: bench.loop.num_running == 2)
    bench.loop.cancel(cancelled, "client")
    wait_for(lambda: len(bench.items()) == 2)
    assert {item["id"]: item["code"] for item in bench.items()} == {1: "deadline_exceeded", 2: "cancelled"}
    assert bench.loop.rounds == 0
    bench.loop.request_stop()
    thread.join(10.0)
    assert not thread.is_alive()


# Requests that cannot start.


def test_request_that_breaks_the_session_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = LoopBench()

    def make(session_id: str, request: GenerationRequest) -> Any:
        if request.prompt_token_ids == (9,):
            raise KeyError("String")
        return make_session_request(session_id, request)

    bench.loop.lanes.serving.make_request = make
    streams = [bench.submit([first], max_tokens=5) for first in (1, 9, 2)]
    items = []
    with caplog.at_level(logging.ERROR):
        while not items or bench.loop.num_running:
            items += bench.round()
    final = {item["id"]: item for item in items if "finish_reason" in item or "code" in item}
    assert (final[1]["finish_reason"], final[3]["finish_reason"]) == ("length", "length")
    assert final[2]["code"] == "engine_failure"
    assert "String" not in final[2]["message"]
    assert streams[1].state is StreamState.DONE
    assert "KeyError" in caplog.text  # with its traceback
    assert bench.metrics.snapshot()["dspark_requests_failed"]["reason=request_failure"] == 1.0


def test_failed_engine_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = LoopBench()

    def add(request: Any) -> None:
        raise DeviceError("gone")

    monkeypatch.setattr(bench.session, "add", add)
    bench.submit([1])
    with pytest.raises(DeviceError, match="gone"):
        bench.round()


def test_request_that_the_candidate_refuses_runs_in_the_lane_that_serves() -> None:
    bench = LoopBench()

    def refuse(session_id: str, request: GenerationRequest) -> Any:
        raise RequestError("this engine serves requests of temperature 0 only", code="greedy_only")

    beside = Lane(Session(FakeEngine(max_seq_len=400), None, speculation="fixed"), refuse, 4)
    bench.loop.lanes.beside, bench.loop.lanes.share = beside, 1.0
    for first in range(6):  # more than the serving lane has slots
        bench.submit([first], max_tokens=5)
    items: list[dict[str, Any]] = []
    while not items or bench.loop.num_running:
        items += bench.round()
    final = {item["id"]: item for item in items if "finish_reason" in item or "code" in item}
    assert [final[number].get("finish_reason") for number in range(1, 7)] == ["length"] * 6
    assert not beside.running
    # What the serving lane refuses too is refused.
    bench.loop.lanes.serving.make_request = refuse
    bench.submit([7])
    assert [item["code"] for item in bench.round()] == ["greedy_only"]


# What is kept of a request that has ended.


class Watched(GenerationRequest):
    """A request whose end can be seen: one with slots only has no weak references."""


def watch(bench: LoopBench, stream: Stream) -> weakref.ref[GenerationRequest]:
    request = stream.request
    assert request is not None
    watched = Watched(**{name: getattr(request, name) for name in GenerationRequest.__slots__})
    stream.request = watched
    return weakref.ref(watched)


@pytest.mark.parametrize("end", ["length", "stop_request", "stopped_waiting", "client", "refused"])
def test_prompt_goes_with_the_last_answer(end: str) -> None:
    bench = LoopBench()
    if end == "refused":
        bench.session.add = lambda request: (_ for _ in ()).throw(RequestError("no"))  # type: ignore[method-assign]
    stream = bench.submit([1, 2], prompt_text="p" * 1000, max_tokens=20, stream=False, echo=True)
    request = watch(bench, stream)
    if end == "stopped_waiting":
        bench.loop.lanes.serving.request_limit = lambda: 0
    items = bench.round()
    if end in ("stop_request", "stopped_waiting", "client"):
        bench.loop.cancel(stream, "client" if end == "client" else "stop_request")
    for _ in range(20):
        items += bench.round()
    assert stream.state is StreamState.DONE
    assert len(items) == 1
    if end in ("length", "stop_request", "stopped_waiting"):
        assert items[0]["text"].startswith("p" * 1000)
        assert items[0]["tokens"][:2] == [1, 2]
    gc.collect()
    assert request() is None
    assert (stream.held_text, stream.held_tokens, stream.held_logprobs) == ([], [], [])


def test_prompt_that_was_read_behind_a_cancellation_goes_too() -> None:
    bench = LoopBench()
    stream = bench.submit([1])
    request = watch(bench, stream)
    read = stream.request
    # The intake hands over what it has read when the loop has ended it already.
    bench.loop._inbox.clear()
    stream.request = None
    bench.loop.cancel(stream, "client")
    bench.round()
    stream.request, read = read, None
    bench.loop.submit(stream)
    assert bench.round() == []
    gc.collect()
    assert request() is None
