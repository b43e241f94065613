"""Engine process and client over a real Unix socket, in one process: handshake, garbage, death, reconnection."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_engine import FakeEngine, greedy

from trtllm_dspark.engine_process import service
from trtllm_dspark.engine_process.connections import ConnectionServer
from trtllm_dspark.engine_process.lanes import Lane
from trtllm_dspark.engine_process.loop import EngineLoop
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.queue import RequestQueue
from trtllm_dspark.engine_process.requests import RequestLimits
from trtllm_dspark.engine_process.service import EngineService
from trtllm_dspark.engine_process.session_request import make_session_request
from trtllm_dspark.engine_process.streams import Stream
from trtllm_dspark.engine_process.swap import DrafterSwap
from trtllm_dspark.errors import RequestError, UsageError
from trtllm_dspark.runtime import Session
from trtllm_dspark.serving.client import EngineClient, EngineUnavailable, is_final
from trtllm_dspark.serving.framing import MAX_FRAME_BYTES, PROTOCOL_VERSION, BlockingConnection, pack


class NoTokenizer:
    """Requests carry ids here."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not needed")


class Process:
    """What the engine process is made of, in threads."""

    def __init__(self, path: str) -> None:
        session = Session(FakeEngine(max_seq_len=2000), None, speculation="fixed")
        metrics = EngineMetrics()
        lane = Lane(session, make_session_request, 4)
        self.loop = EngineLoop(lane, queue=RequestQueue(max_waiting=8), metrics=metrics)
        limits = RequestLimits(max_seq_len=2000, vocab_size=64, max_draft_len=4, max_prompt_bytes=1000)
        self.service = EngineService(self.loop, NoTokenizer(), limits, metrics, {"name": "fake"})
        self.server = ConnectionServer(path, self.service)
        self.server.start()
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def stop(self) -> None:
        self.server.stop()
        self.loop.request_stop()
        self._thread.join(20.0)
        assert not self._thread.is_alive()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def process(path: str) -> Iterator[Process]:
    started = Process(path)
    yield started
    started.stop()


@pytest.fixture
def client(process: Process, path: str) -> Iterator[EngineClient]:
    opened = EngineClient(path, name="test")
    opened.start()
    assert opened.wait_connected(5.0)
    yield opened
    opened.close()


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": [5],
        "max_tokens": 30,
        "return_tokens": True,
        "stream": True,
        "ignore_eos": True,
        **changes,
    }


def collect(client: EngineClient, request: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    done = threading.Event()

    def on_item(item: dict[str, Any]) -> None:
        items.append(item)
        if is_final(item):
            done.set()

    client.add(request, on_item, **options)
    assert done.wait(20.0)
    return items


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_client_request_gets_the_greedy_tokens(client: EngineClient) -> None:
    items = collect(client, fields())
    assert [token for item in items for token in item["tokens"]] == greedy([5], 30)
    assert client.engine["name"] == "fake"
    assert client.num_open == 0


def test_client_refused_request_gets_a_code(client: EngineClient) -> None:
    (item,) = collect(client, fields(max_tokens=0))
    assert item["code"] == "out_of_range"
    (item,) = collect(client, {"colour": "red"})
    assert item["code"] == "unknown_field"


def test_client_refusal_quotes_a_value_of_megabytes_in_a_line(client: EngineClient) -> None:
    # Spelled out it would fit no frame.
    for changes in ({"latency_class": "\x80" * 10_000_000}, {"\x80" * 10_000_000: 1}):
        (item,) = collect(client, fields(**changes))
        assert item["code"] in ("out_of_range", "unknown_field")
        assert r"\x80\x80" in item["message"]
        assert len(item["message"]) < 200
    assert len(collect(client, fields())) > 1


def test_refusal_that_fits_no_frame_or_fails_leaves_the_intake_alive(
    process: Process, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[Exception] = [RequestError("x" * (MAX_FRAME_BYTES + 1), code="chat_template"), KeyError("x")]
    monkeypatch.setattr(service, "parse_request", lambda *args: (_ for _ in ()).throw(reasons.pop(0)))
    (item,) = collect(client, fields())
    assert item["code"] == "chat_template"
    (item,) = collect(client, fields())
    assert item["code"] == "invalid_request"
    monkeypatch.undo()
    reject = process.service._reject
    failures = [1]

    def fail_once(stream: Stream, error: RequestError) -> None:
        if failures:
            failures.pop()
            raise OSError("planted failure")
        reject(stream, error)

    monkeypatch.setattr(process.service, "_reject", fail_once)
    client.add(fields(max_tokens=0), lambda item: None)
    wait_for(lambda: not failures)
    assert len(collect(client, fields())) > 1


def test_status_stays_short_whatever_clients_call_themselves(process: Process, path: str) -> None:
    connection = BlockingConnection(path)
    connection.send({"type": "hello", "protocol": PROTOCOL_VERSION, "name": "n" * 10_000_000, "role": "r" * 10_000_000})
    assert connection.receive_one(timeout_s=5.0)["type"] == "hello"
    connection.send({"type": "status"})
    (me,) = connection.receive_one(timeout_s=5.0)["clients"]
    assert len(me["name"]) == len(me["role"]) == 80
    connection.close()


def test_swap_of_a_path_of_megabytes_is_refused_in_a_line(process: Process, path: str) -> None:
    process.service.swap = DrafterSwap(process.loop.lanes, lambda engine_dir: None, EngineMetrics(), wake=lambda: None)  # type: ignore[arg-type, return-value]
    connection = BlockingConnection(path)
    connection.send({"type": "hello", "protocol": PROTOCOL_VERSION})
    connection.receive_one(timeout_s=5.0)
    for fields in ({"engine_dir": "e" * 10_000_000}, {"engine_dir": "e", "options": {"o" * 10_000_000: 1}}):
        connection.send({"type": "swap", **fields})
        answer = connection.receive_one(timeout_s=5.0)
        assert 0 < len(answer["error"]) <= 300
    connection.close()


def test_client_receiver_that_fails_does_not_silence_the_others(client: EngineClient) -> None:
    def broken(item: dict[str, Any]) -> None:
        raise KeyError("text")

    client.add(fields(max_tokens=3), broken)
    wait_for(lambda: client.num_open == 0)
    assert len(collect(client, fields())) > 1


def test_two_clients_share_the_engine_and_stop_by_id_reaches_the_other(
    process: Process, client: EngineClient, path: str
) -> None:
    items: list[dict[str, Any]] = []
    client.add(fields(max_tokens=1900), items.append, request_id="mine")
    wait_for(lambda: bool(items))
    other = EngineClient(path, name="other")
    other.start()
    assert other.wait_connected(5.0)
    (refused,) = collect(other, fields(), request_id="mine")
    assert refused["code"] == "duplicate_request_id"
    other.post({"type": "stop", "id": 0, "request_id": "mine"})
    wait_for(lambda: is_final(items[-1]))
    assert items[-1]["finish_reason"] == "cancelled"
    other.close()


def test_client_that_leaves_takes_its_requests_with_it(process: Process, path: str) -> None:
    opened = EngineClient(path, name="leaver")
    opened.start()
    assert opened.wait_connected(5.0)
    items: list[dict[str, Any]] = []
    opened.add(fields(max_tokens=1900), items.append)
    wait_for(lambda: process.loop.num_running == 1)
    opened.close()
    wait_for(lambda: process.loop.num_running == 0)
    assert items[-1]["code"] == "engine_unavailable"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        pack({"type": "add", "id": 1, "fields": {}}),  # no hello first
        pack({"type": "hello", "protocol": PROTOCOL_VERSION + 1}),
    ],
)
def test_garbage_closes_its_connection_and_no_other(client: EngineClient, path: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(path)
        raw.sendall(data)
        raw.settimeout(5.0)
        assert raw.recv(100) == b""
    assert len(collect(client, fields())) > 1


def test_odd_messages_after_the_hello_are_answered(process: Process, path: str) -> None:
    connection = BlockingConnection(path)
    connection.send({"type": "hello", "protocol": PROTOCOL_VERSION, "pid": "x", "role": 7})
    assert connection.receive_one(timeout_s=5.0)["type"] == "hello"
    connection.send({"type": "dance", "id": 3})
    assert connection.receive_one(timeout_s=5.0)["code"] == "unknown_type"
    connection.send({"type": "add", "id": "x", "fields": 5})
    assert connection.receive_one(timeout_s=5.0)["code"] == "invalid_type"
    # Answers to these would not fit a frame if they repeated the id.
    for kind in ("stop", "dance"):
        connection.send({"type": kind, "id": "x" * (MAX_FRAME_BYTES - 25)})
        assert connection.receive_one(timeout_s=5.0)["id"] == -1
    connection.send({"type": "cancel", "id": 99})
    connection.send({"type": "status"})
    assert connection.receive_one(timeout_s=5.0)["type"] == "status"
    connection.close()


def test_engine_end_tells_open_requests_and_the_client_finds_the_next_one(path: str) -> None:
    first = Process(path)
    client = EngineClient(path, name="test")
    client.start()
    assert client.wait_connected(5.0)
    items: list[dict[str, Any]] = []
    client.add(fields(max_tokens=1900), items.append)
    wait_for(lambda: bool(items))
    first.stop()
    wait_for(lambda: is_final(items[-1]))
    assert items[-1]["code"] == "engine_unavailable"
    wait_for(lambda: not client.connected)
    with pytest.raises(EngineUnavailable):
        client.add(fields(), items.append)
    second = Process(path)
    assert client.wait_connected(10.0)
    assert len(collect(client, fields())) > 1
    client.close()
    second.stop()
    assert not os.path.exists(path)


def test_listen_where_another_process_listens_is_refused(process: Process, path: str) -> None:
    with pytest.raises(UsageError, match="another engine process listens"):
        ConnectionServer(path, process.service)


def test_listen_on_a_path_that_cannot_be_is_refused(process: Process) -> None:
    for bad in ("/nonexistent/directory/s", "/tmp/" + "x" * 200):
        with pytest.raises(UsageError, match="cannot listen on the socket"):
            ConnectionServer(bad, process.service)


def test_listen_replaces_the_socket_of_a_dead_process(tmp_path: Path) -> None:
    path = str(tmp_path / "stale")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    Process(path).stop()


def test_accept_out_of_descriptors_pauses_and_takes_the_client_later(
    process: Process, client: EngineClient, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []
    accept = process.server._accept
    monkeypatch.setattr(process.server, "_accept", lambda: (tries.append(1), accept()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Files of tests before this one that nobody closed would make room when they are collected.
    gc.collect()
    with socket.socket(socket.AF_UNIX) as late:
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        held: list[int] = []
        try:
            with contextlib.suppress(OSError):
                # Whatever another thread closed in the meantime.
                while True:
                    held.append(os.dup(0))
            late.connect(path)
            wait_for(lambda: len(tries) >= 3)
            num_tries, started = len(tries), time.monotonic()
            assert len(collect(client, fields())) > 1  # the clients it has are served
            # Twice a second, however long that took here; without a pause it would be thousands.
            assert len(tries) <= num_tries + 3 + 2 * (time.monotonic() - started)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in held:
                os.close(number)
        late.sendall(pack({"type": "hello", "protocol": PROTOCOL_VERSION}))
        late.settimeout(5.0)
        assert late.recv(100)
    assert len([record for record in caplog.records if "cannot accept a client" in record.message]) == 1
