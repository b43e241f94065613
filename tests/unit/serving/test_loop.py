"""The engine loop over a real session with an engine in NumPy: rounds are counted, not timed."""

from __future__ import annotations

import threading
import time

import pytest
from helpers.fake_engine import FakeEngine, greedy
from helpers.loop_bench import LoopBench

from trtllm_dspark.engine_process.lanes import Lane, LaneSet
from trtllm_dspark.engine_process.session_request import make_session_request
from trtllm_dspark.engine_process.streams import Stream
from trtllm_dspark.errors import DeviceError
from trtllm_dspark.runtime import Session


def test_round_sends_one_frame_with_one_item_a_request() -> None:
    bench = LoopBench()
    for first in (1, 2, 3):
        bench.submit([first])
    bench.round()
    bench.round()
    assert len(bench.frames) == 1
    assert sorted(item["id"] for item in bench.items()) == [1, 2, 3]


def test_stream_items_concatenate_to_the_greedy_tokens_and_unary_gets_them_at_once() -> None:
    bench = LoopBench()
    bench.submit([5], max_tokens=40)
    bench.submit([5], max_tokens=40, stream=False, echo=True)
    tokens: dict[int, list[list[int]]] = {1: [], 2: []}
    while bench.loop.num_running or not tokens[1]:
        for item in bench.round():
            tokens[item["id"]].append(item["tokens"])
    assert sum(tokens[1], []) == greedy([5], 40)
    assert tokens[2] == [[5, *greedy([5], 40)]]


def test_closed_admission_keeps_requests_waiting_and_lets_running_ones_go_on() -> None:
    bench = LoopBench()
    allowed = 1
    bench.loop.lanes.serving.request_limit = lambda: allowed
    for first in range(3):
        bench.submit([first], max_tokens=12)
    bench.round()
    assert (bench.loop.num_running, bench.loop.num_waiting) == (1, 2)
    allowed = 0
    while bench.loop.num_running:
        assert bench.round()
    bench.round()
    # Nobody holds a slot and nothing is computed: the loop sleeps until the load allows more.
    assert (bench.loop.num_waiting, bench.session.has_unfinished()) == (2, False)
    allowed = 7
    bench.round()
    assert (bench.loop.num_running, bench.loop.num_waiting) == (2, 0)


def test_load_limits_the_requests_of_both_lanes_together() -> None:
    engines = FakeEngine(), FakeEngine()
    serving, beside = (Lane(Session(engine, None, speculation="fixed"), make_session_request, 4) for engine in engines)
    lanes = LaneSet(serving, seed=1)
    lanes.beside, lanes.share = beside, 0.5
    limit: int | None = 3
    serving.request_limit = beside.request_limit = lambda: limit

    def fill() -> int:
        while (lane := lanes.choose()) is not None:
            lane.running[str(lanes.num_running)] = Stream(
                send=lambda frame: None, connection_id=1, handle=0, session_id="", request_id="", arrival=0.0
            )
        assert lanes.num_free == 0
        return lanes.num_running

    assert fill() == 3
    assert serving.running
    assert beside.running
    limit = 2
    assert fill() == 3  # those that run go on
    # Without a limit of the load every slot of both counts, and a lane that is emptied still counts as load.
    limit = None
    beside.draining = True
    assert fill() == 4 + len(beside.running)
    limit = 5
    serving.running.clear()
    assert fill() == 5


def test_cancel_frees_the_slot_before_the_next_round() -> None:
    bench = LoopBench()
    streams = [bench.submit([first]) for first in range(5)]  # four slots
    bench.round()
    assert (bench.loop.num_running, bench.loop.num_waiting) == (4, 1)
    bench.loop.cancel(streams[0], "client")
    items = bench.round()
    assert {"type": "error", "id": 1, "code": "cancelled", "message": "the client cancelled the request"} in items
    assert bench.loop.num_waiting == 0
    # Within two rounds of being seen, the waiting request has its first token.
    assert 5 in {item["id"] for item in [*items, *bench.round()]}


@pytest.mark.parametrize("reason", ["client", "stop_request", "deadline"])
def test_end_in_the_middle_of_a_prompt_frees_the_slot_before_the_next_round(reason: str) -> None:
    bench = LoopBench(FakeEngine(max_seq_len=400, max_batch_size=1))
    bench.submit([index % 60 for index in range(200)])  # seven rounds of prompt, 32 tokens each
    waiting = bench.submit([7], max_tokens=5)
    assert bench.round() == []
    stream = next(iter(bench.loop.lanes.serving.running.values()))
    assert stream.first_token_at is None
    if reason == "deadline":
        stream.deadline = 0.0
        bench.loop._deadlines.append((0.0, 0, stream))
    else:
        bench.loop.cancel(stream, reason)
    first = bench.round()
    assert [item["id"] for item in first if "code" in item or "finish_reason" in item] == [1]
    assert waiting.session_id in bench.loop.lanes.serving.running
    assert 2 in {item["id"] for item in [*first, *bench.round()]}


def test_cancel_of_waiting_and_of_unread_requests_never_reaches_the_session() -> None:
    bench = LoopBench()
    streams = [bench.submit([first]) for first in range(6)]
    bench.round()
    bench.loop.cancel(streams[5], "client")
    unread = bench.submit([9])
    bench.loop.cancel(unread, "disconnected")
    items = bench.round()
    assert {item["id"] for item in items if item.get("code") == "cancelled"} == {6, 7}
    assert bench.loop.num_waiting == 1
    bench.loop.cancel(unread, "client")  # a second time changes nothing
    assert not any("code" in item for item in bench.round())


def test_stop_request_gets_a_final_answer_not_an_error() -> None:
    bench = LoopBench()
    stream = bench.submit([1], stream=False)
    for _ in range(3):
        bench.round()
    bench.loop.cancel(stream, "stop_request")
    (item,) = bench.round()
    assert item["finish_reason"] == "cancelled"
    assert item["tokens"] == greedy([1], len(item["tokens"]))
    assert len(item["tokens"]) >= 3


def test_stop_request_of_an_echoing_request_answers_with_the_prompt_and_counts_the_output() -> None:
    bench = LoopBench()
    stream = bench.submit([1, 2], prompt_text="ab", stream=False, echo=True, logprobs=True)
    for _ in range(3):
        bench.round()
    bench.loop.cancel(stream, "stop_request")
    (item,) = bench.round()
    output = item["tokens"][2:]
    assert item["tokens"] == [1, 2, *greedy([1, 2], len(output))]
    assert item["text"] == "ab"
    assert item["num_tokens"] == len(item["logprobs"]) == len(output) >= 3


def test_deadlines_of_finished_requests_are_forgotten() -> None:
    bench = LoopBench()
    for first in range(200):
        bench.submit([first % 60], max_tokens=1, timeout_s=1e6)
        bench.round()
    assert bench.loop.num_running == 0
    assert len(bench.loop._deadlines) <= 65


def test_deadline_ends_waiting_and_running_requests() -> None:
    bench = LoopBench()
    for first in range(4):
        bench.submit([first])
    bench.round()
    bench.submit([7], timeout_s=0.01)
    running = bench.submit([8], timeout_s=0.01, priority=1)
    time.sleep(0.02)
    items = bench.round()
    assert {item["id"] for item in items if item.get("code") == "deadline_exceeded"} == {5, 6}
    assert running.request is None  # its prompt went with the answer
    assert bench.metrics.snapshot()["dspark_requests_cancelled"]["reason=deadline"] == 2.0


def test_queue_full_is_refused_and_counted() -> None:
    bench = LoopBench(max_waiting=1)
    for first in range(7):
        bench.submit([first])
    items = bench.round()
    # All seven arrive before the first admission: four slots are free and one may wait.
    assert [item["id"] for item in items if item.get("code") == "queue_full"] == [6, 7]
    bench.submit([9])
    assert [item["id"] for item in bench.round() if item.get("code") == "queue_full"] == [8]
    assert bench.metrics.snapshot()["dspark_requests_rejected"]["reason=queue_full"] == 3.0


def test_run_engine_failure_tells_everybody_and_raises() -> None:
    bench = LoopBench(FakeEngine(fail_after=3))
    for first in range(6):
        bench.submit([first])
    with pytest.raises(DeviceError, match="planted failure"):
        bench.loop.run()
    failed = [item for item in bench.items() if item.get("code") == "engine_failure"]
    assert sorted(item["id"] for item in failed) == [1, 2, 3, 4, 5, 6]
    assert all("planted" not in item["message"] for item in failed)


def test_run_stop_finishes_open_requests_and_refuses_new_ones() -> None:
    bench = LoopBench()
    for first in range(6):
        bench.submit([first], max_tokens=20)
    thread = threading.Thread(target=bench.loop.run)
    bench.round()
    bench.loop.request_stop()
    bench.submit([9])
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()
    finals = {item["id"]: item for item in bench.items() if "finish_reason" in item or "code" in item}
    assert finals.pop(7)["code"] == "shutting_down"
    assert {item["finish_reason"] for item in finals.values()} == {"length"}
    assert len(finals) == 6


def test_metrics_count_tokens_rounds_and_acceptance() -> None:
    bench = LoopBench()
    bench.submit([3], max_tokens=30)
    while bench.round() or bench.loop.num_running:
        pass
    series = bench.metrics.snapshot()
    assert series["dspark_output_tokens"] == {"": 30.0}
    assert series["dspark_input_tokens"] == {"": 1.0}
    assert series["dspark_requests_finished"]["reason=length"] == 1.0
    assert series["dspark_verify_emitted_tokens"][""] == 29.0  # the prefill's token does not count
    accepted = sum(series["dspark_accepted_at_position"].values())
    assert accepted == series["dspark_accepted_tokens"][""] > 0
    assert series["dspark_time_to_first_token_seconds_count"] == {"": 1.0}
    assert series["dspark_time_to_first_token_seconds_bucket"]["le=+Inf"] == 1.0
