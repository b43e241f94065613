"""Messages that fit no frame: whoever asked hears something, and nobody else is touched."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtllm_dspark.engine_process import connections
from trtllm_dspark.engine_process.connections import Connection, ConnectionServer
from trtllm_dspark.engine_process.frames import frames_of
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.publisher import Publisher
from trtllm_dspark.engine_process.requests import GenerationRequest
from trtllm_dspark.engine_process.streams import Stream
from trtllm_dspark.runtime.outputs import RequestOutput
from trtllm_dspark.runtime.stats import RequestStats
from trtllm_dspark.serving.client import EngineClient
from trtllm_dspark.serving.framing import MAX_FRAME_BYTES, PROTOCOL_VERSION, FrameDecoder, Message

MB = 1 << 20


def read(frames: list[bytes]) -> list[Message]:
    decoder = FrameDecoder()
    return [message for frame in frames for message in decoder.feed(frame)]


def test_message_that_fits_is_one_frame() -> None:
    message = {"type": "outputs", "items": [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]}
    assert read(frames_of(message)) == [message]


def test_oversize_item_alone_fails_and_the_others_keep_their_order() -> None:
    items = [{"id": number, "text": "x", "num_tokens": 1} for number in range(5)]
    items[2]["text"] = "x" * (MAX_FRAME_BYTES + 1)
    messages = read(frames_of({"type": "outputs", "items": items}))
    flat = [item for message in messages for item in message.get("items", [message])]
    assert [item["id"] for item in flat] == [0, 1, 2, 3, 4]
    assert [item.get("code") for item in flat] == [None, None, "answer_too_large", None, None]
    assert len(flat[2]["message"]) < 200


def test_items_too_large_together_go_in_several_frames() -> None:
    items = [{"id": number, "text": "x" * (20 * MB)} for number in range(3)]
    messages = read(frames_of({"type": "outputs", "items": items}))
    assert [[item["id"] for item in message["items"]] for message in messages] == [[0], [1], [2]]


def test_refusal_that_cannot_be_packed_keeps_its_code() -> None:
    for message in ("x" * (MAX_FRAME_BYTES + 1), "\ud83d"):
        (sent,) = read(frames_of({"type": "error", "id": 7, "code": "out_of_range", "message": message}))
        assert (sent["type"], sent["id"], sent["code"]) == ("error", 7, "out_of_range")


def test_message_of_no_request_that_fits_no_frame_is_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert frames_of({"type": "status", "clients": "x" * (MAX_FRAME_BYTES + 1)}) == []
    assert "a message of type status is not sent" in caplog.text


class Hub:
    """A handler that keeps the connection of its client."""

    connection: Connection | None = None

    def hello(self, connection: Connection) -> Message:
        self.connection = connection
        return {"type": "hello", "protocol": PROTOCOL_VERSION, "pid": 1, "engine": {}}

    def message(self, connection: Connection, message: Message) -> None:
        connection.send({"type": "pong"})

    def closed(self, connection: Connection) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Connection, EngineClient]]:
    handler = Hub()
    server = ConnectionServer(str(tmp_path / "s"), handler)
    server.start()
    client = EngineClient(str(tmp_path / "s"), name="test")
    client.start()
    assert client.wait_connected(5.0)
    assert handler.connection is not None
    yield handler.connection, client
    client.close()
    server.stop()


class Answers:
    """Items of a client's requests until each is final."""

    def __init__(self, client: EngineClient, count: int) -> None:
        self.items: dict[int, dict[str, Any]] = {}
        self._all = threading.Event()
        self._count = count
        self.handles = [client.add({}, self._take) for _ in range(count)]

    def _take(self, item: dict[str, Any]) -> None:
        self.items[item["id"]] = item
        if len(self.items) == self._count:
            self._all.set()

    def wait(self) -> dict[int, dict[str, Any]]:
        assert self._all.wait(60.0), sorted(self.items)
        return self.items


def echoing(connection: Connection, handle: int, prompt: str) -> Stream:
    request = GenerationRequest(
        prompt_token_ids=(1,), prompt_text=prompt, max_tokens=1, min_tokens=0, temperature=0.0, top_k=0, top_p=1.0,
        seed=None, stop=(), stop_token_ids=(), ignore_eos=True, max_draft_len=None, priority=5, timeout_s=None,
        stream=False, echo=True, return_tokens=True, return_stats=False, return_token_texts=False, logprobs=False,
    )  # fmt: skip
    now = time.monotonic()
    return Stream(connection.send, connection.connection_id, handle, str(handle), "", now, request=request)


def test_echoed_prompts_of_one_round_all_arrive_however_large_together(hub: tuple[Connection, EngineClient]) -> None:
    """They are also more than a client may leave unread."""
    connection, client = hub
    size, count = 9 * MB, 9
    assert size * count > max(MAX_FRAME_BYTES, connections.MAX_UNSENT_BYTES)
    answers = Answers(client, count + 1)
    pairs = []
    for number, handle in enumerate(answers.handles):
        prompt = "p" * (size if number else MAX_FRAME_BYTES + 1)
        output = RequestOutput(str(handle), (5,), "!", True, "length", RequestStats(1, 4, 0.0))
        pairs.append((echoing(connection, handle, prompt), output))
    Publisher(EngineMetrics(), str).publish(pairs, time.monotonic())
    items = answers.wait()
    failed, *whole = [items[handle] for handle in answers.handles]
    assert failed["code"] == "answer_too_large"
    assert all(item["text"] == "p" * size + "!" and item["finish_reason"] == "length" for item in whole)
    assert client.connected


def test_client_that_takes_nothing_is_closed(
    hub: tuple[Connection, EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_UNSENT_BYTES", MB)
    monkeypatch.setattr(connections, "STALLED_S", 0.2)
    connection, client = hub
    blocked = threading.Event()
    handle = client.add({}, lambda item: blocked.wait(30.0))
    connection.send({"type": "outputs", "items": [{"id": handle, "text": "x", "num_tokens": 1}]})
    deadline = time.monotonic() + 20.0
    while not connection.dead and time.monotonic() < deadline:
        connection.send({"type": "outputs", "items": [{"id": handle, "text": "x" * (MB // 4), "num_tokens": 1}]})
        time.sleep(0.05)
    assert connection.dead
    blocked.set()
