"""Clients of the OpenAI front that leave early: their rows end, wherever the answer was."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("starlette")
from starlette.requests import ClientDisconnect

from trtllm_dspark.serving.openai_front.app import OpenAIFront

BODY = {"model": "m", "prompt": "a", "max_tokens": 5}


class Engine:
    """A client of the engine process that answers when told to."""

    def __init__(self, *, answers: int = 0) -> None:
        self.engine = {"name": "m"}
        self.connected = True
        self.cancelled: list[int] = []
        self._answers = answers

    def add(self, fields: dict[str, Any], on_item: Callable[[dict[str, Any]], None]) -> int:
        for _ in range(self._answers):
            on_item({"id": 1, "text": "b", "num_tokens": 1})
        return 1

    def cancel(self, handle: int) -> None:
        self.cancelled.append(handle)


def call(engine: Engine, *, stream: bool, fail_at: str = "") -> list[str]:
    """Post BODY and leave at once; `fail_at` is the message whose sending finds the client gone."""
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": [],
    }  # fmt: skip
    incoming = [{"type": "http.request", "body": json.dumps({**BODY, "stream": stream}).encode(), "more_body": False}]
    sent: list[str] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == fail_at:
            raise OSError("the client has gone")
        sent.append(message["type"])

    async def run() -> None:
        app = OpenAIFront(engine).application()  # type: ignore[arg-type]
        with contextlib.suppress(ClientDisconnect):
            await asyncio.wait_for(app(scope, receive, send), 10.0)

    asyncio.run(run())
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_before_the_first_item_ends_its_row(stream: bool) -> None:
    engine = Engine()
    call(engine, stream=stream)
    assert 1 in engine.cancelled


def test_client_gone_between_the_first_item_and_the_first_event_ends_its_row() -> None:
    engine = Engine(answers=1)
    assert call(engine, stream=True, fail_at="http.response.start") == []
    assert 1 in engine.cancelled


def test_client_gone_at_an_event_ends_its_row() -> None:
    engine = Engine(answers=3)
    assert call(engine, stream=True, fail_at="http.response.body") == ["http.response.start"]
    assert 1 in engine.cancelled
