"""Every way a request can end early frees its slot: before the first token, in the queue and in the middle."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.grpc_client import GrpcStream, text
from helpers.triton_server import Server, error_code, wait_for

# One token a round, so that it would run for seconds.
LONG = {"text_input": "a", "max_tokens": 2000, "num_draft_tokens": 0}
TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def streams(server: Server) -> Iterator[list[GrpcStream]]:
    """Return five streams, each with a request; the server has four slots, so the last one waits."""
    opened = [GrpcStream(server.grpc_url) for _ in range(5)]
    for index, stream in enumerate(opened):
        stream.send("ensemble", {**LONG, "stream": True}, request_id=f"long {index}")
        if index == 3:
            wait_for(lambda: server.metric("dspark_requests_running") == 4)
    wait_for(lambda: server.metric("dspark_requests_waiting") == 1)
    yield opened
    for stream in opened:
        stream.cancel()
        stream.close()


def cancelled(server: Server, reason: str) -> float:
    return server.metric("dspark_requests_cancelled", reason=reason)


def test_grpc_cancel_frees_slots_running_and_waiting(server: Server, streams: list[GrpcStream]) -> None:
    before = cancelled(server, "client")
    streams[4].cancel()  # still in the queue
    wait_for(lambda: cancelled(server, "client") == before + 1)
    assert server.metric("dspark_requests_running") == 4
    streams[0].cancel()  # in the middle
    wait_for(lambda: cancelled(server, "client") == before + 2)
    assert server.generate_text("a", 5) == "bcdef"  # takes the free slot while the others run


def test_grpc_client_killed_frees_its_slot(server: Server) -> None:
    before = cancelled(server, "client")
    script = (
        f"import sys; sys.path.insert(0, {TESTS!r})\n"
        "from helpers.grpc_client import GrpcStream, text\n"
        f"stream = GrpcStream({server.grpc_url!r})\n"
        f"stream.send('ensemble', {{**{LONG!r}, 'stream': True}})\n"
        "print(text(stream.receive()[0]), flush=True)\n"
        "stream.receive(timeout_s=60)\n"
        "import time; time.sleep(60)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "b\n"
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    wait_for(lambda: cancelled(server, "client") == before + 1)


def test_sse_client_gone_frees_its_slot_at_the_next_write(server: Server) -> None:
    before = cancelled(server, "client")
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20.0)
    connection.request("POST", "/v2/models/ensemble/generate_stream", json.dumps({**LONG, "stream": True}))
    response = connection.getresponse()
    response.readline()
    response.close()
    connection.close()
    wait_for(lambda: cancelled(server, "client") == before + 1)


@pytest.mark.parametrize("entry", ["ensemble", "tensorrt_llm_bls", "ensemble_unary"])
def test_stop_by_request_id_ends_the_request_with_a_final_response(
    server: Server, streams: list[GrpcStream], entry: str
) -> None:
    before = cancelled(server, "stop_request")
    streams[1].receive()
    status, answer = server.generate(entry, text_input="", max_tokens=1, stop=True, id="long 1")
    assert (status, answer["text_output"]) == (200, "")
    *_, last = streams[1].until_final()
    assert last.as_numpy("finish_reason")[0] == b"cancelled"
    assert text(last) == ""
    wait_for(lambda: cancelled(server, "stop_request") == before + 1)


def test_stop_of_a_unary_request_returns_its_text_so_far(server: Server) -> None:
    answers: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: answers.append(server.generate("ensemble_unary", **LONG, id="unary")[1]))
    thread.start()
    wait_for(lambda: server.metric("dspark_requests_running") == 1)
    server.generate(text_input="a", max_tokens=1, stop=True, id="unary")
    thread.join()
    assert answers[0]["finish_reason"] == "cancelled"
    assert answers[0]["text_output"].startswith("bcdefghé ")


def test_stop_of_an_unknown_id_is_answered(server: Server) -> None:
    assert server.generate(text_input="a", max_tokens=1, stop=True, id="nobody")[0] == 200


def test_deadline_in_the_queue_and_in_the_middle(server: Server, streams: list[GrpcStream]) -> None:
    status, answer = server.generate(text_input="a", max_tokens=1, timeout_ms=100)
    assert (status, error_code(answer)) == (400, "deadline_exceeded")
    for stream in streams:
        stream.cancel()
    wait_for(lambda: server.metric("dspark_requests_running") == 0)
    events = list(server.events(**LONG, stream=True, timeout_ms=300))
    assert len(events) > 1
    assert error_code(events[-1]) == "deadline_exceeded"
    # Triton's own request parameter, in microseconds.
    status, answer = server.generate(**LONG, timeout=300_000)
    assert (status, error_code(answer)) == (400, "deadline_exceeded")


def test_unary_http_request_that_nobody_reads_ends_at_its_deadline(server: Server) -> None:
    before = cancelled(server, "deadline")
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20.0)
    connection.request("POST", "/v2/models/ensemble_unary/generate", json.dumps({**LONG, "timeout_ms": 300}))
    connection.close()
    wait_for(lambda: cancelled(server, "deadline") == before + 1)
    assert server.generate_text("a", 5) == "bcdef"


def test_priority_overtakes_in_the_queue(server: Server, streams: list[GrpcStream]) -> None:
    scheduled: dict[int, int] = {}

    def ask(priority: int) -> None:
        # The order in which answers reach this process says nothing: the engine's own clock does.
        _, answer = server.generate(text_input="a", max_tokens=1, priority=priority, return_perf_metrics=True)
        scheduled[priority] = answer["first_scheduled_time_ns"]

    threads = [threading.Thread(target=ask, args=(priority,)) for priority in (9, 5, 1)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    # One look at the gauges, which are half a second apart: the four streams end by themselves after a second or two.
    wait_for(lambda: server.metric("dspark_requests_waiting") == 4)
    streams[4].cancel()
    time.sleep(0.1)
    streams[0].cancel()  # one slot becomes free: the three run one after the other
    for thread in threads:
        thread.join()
    assert sorted(scheduled, key=scheduled.__getitem__) == [1, 5, 9]
