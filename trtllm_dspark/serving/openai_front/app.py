"""The HTTP application: models, completions, chat completions, health."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trtllm_dspark.errors import shown
from trtllm_dspark.serving.client import ENGINE_UNAVAILABLE, EngineClient, EngineUnavailable, is_final
from trtllm_dspark.serving.framing import Message, UnsendableMessage
from trtllm_dspark.serving.openai_front.answers import Answer
from trtllm_dspark.serving.openai_front.errors import FrontError, error_body, status_of
from trtllm_dspark.serving.openai_front.schema import FrontRequest, parse_body

MAX_BODY_BYTES = 8 * 1024 * 1024
_DISCONNECT_POLL_S = 0.1
_CLIENT_GONE = 499

T = TypeVar("T")


class _Rows:
    """The rows of one HTTP request in the engine process, as one asynchronous stream of (row, item)."""

    def __init__(self, client: EngineClient, request: FrontRequest) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._handles: list[int] = []
        self._left = set(range(len(request.rows)))
        try:
            for row, fields in enumerate(request.rows):
                self._handles.append(client.add(fields, self._callback(row)))
        except EngineUnavailable as error:
            self.cancel()
            raise FrontError(f"{error}; retry in a few seconds", code=ENGINE_UNAVAILABLE) from error
        except UnsendableMessage as error:
            self.cancel()
            raise FrontError(f"{error}; correct or shorten it", code=error.code) from error

    def _callback(self, row: int) -> Any:
        def on_item(item: Message) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (row, item))

        return on_item

    async def __aiter__(self) -> AsyncIterator[tuple[int, Message]]:
        """Yield items until every row is final; an error of one row ends them all.

        Raises:
            FrontError: with the engine's code.
        """
        while self._left:
            row, item = await self._queue.get()
            if "code" in item:
                raise FrontError(item["message"], code=item["code"])
            if is_final(item):
                self._left.discard(row)
            yield row, item

    def cancel(self) -> None:
        """End whatever is still running; harmless at the end."""
        for handle in self._handles:
            self._client.cancel(handle)


class OpenAIFront:
    """Handlers over one engine client.

    Args:
        client: connected or connecting client of the engine process.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._created = int(time.time())

    def application(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={FrontError: _on_front_error, 404: _on_not_found, 405: _on_not_found, 500: _on_bug},
        )

    @property
    def _names(self) -> tuple[str, ...]:
        """Names a client may ask for: the engine's first."""
        return (str(self._client.engine.get("name") or "ensemble"), "ensemble", "tensorrt_llm_bls")

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"ready": self._client.connected}, 200 if self._client.connected else 503)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe(self._names[0])]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._names:
            raise FrontError(f"there is no model {shown(name)} here", code="model_not_found", param="model")
        return JSONResponse(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "trtllm-dspark",
            "max_model_len": self._client.engine.get("max_seq_len"),
        }

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, chat=True)

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        body = await _read_body(request)
        parsed = parse_body(body, chat=chat, models=self._names)
        answer = Answer(parsed, json.loads(body)["model"])
        rows = _Rows(self._client, parsed)
        if parsed.stream:
            return await self._stream(request, parsed, answer, rows)
        return await self._unary(request, answer, rows)

    async def _stream(self, request: Request, parsed: FrontRequest, answer: Answer, rows: _Rows) -> Response:
        # The first item decides about the status: a refusal is an HTTP error, not an event under 200.
        items = aiter(rows)
        try:
            first = await _unless_gone(request, anext(items))
        except BaseException:
            rows.cancel()
            raise
        if first is None:
            rows.cancel()
            return Response(status_code=_CLIENT_GONE)
        return _EventStream(self._events(parsed, answer, first, items), rows)

    async def _unary(self, request: Request, answer: Answer, rows: _Rows) -> Response:
        async def collect() -> bool:
            async for row, item in rows:
                answer.choices[row].add(item)
            return True

        try:
            if await _unless_gone(request, collect()) is None:
                return Response(status_code=_CLIENT_GONE)
        finally:
            rows.cancel()
        return JSONResponse(answer.body())

    async def _events(
        self,
        parsed: FrontRequest,
        answer: Answer,
        first: tuple[int, Message],
        items: AsyncIterator[tuple[int, Message]],
    ) -> AsyncIterator[bytes]:
        try:
            yield _event(answer.chunk(*first))
            async for row, item in items:
                yield _event(answer.chunk(row, item))
            if parsed.include_usage:
                yield _event(answer.usage_chunk())
            yield b"data: [DONE]\n\n"
        except FrontError as error:
            yield _event(error_body(error.code, str(error), param=error.param))


class _EventStream(StreamingResponse):
    """Server-sent events whose rows end with the response, even where the client leaves before the first event."""

    def __init__(self, events: AsyncIterator[bytes], rows: _Rows) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._rows = rows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._rows.cancel()


async def _unless_gone(request: Request, wanted: Awaitable[T]) -> T | None:
    """Await something while the client is there; None when it has left."""
    task = asyncio.ensure_future(wanted)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=_DISCONNECT_POLL_S)
            if not task.done() and await request.is_disconnected():
                return None
        return await task
    finally:
        task.cancel()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise FrontError(f"the body is larger than {MAX_BODY_BYTES} bytes; shorten it", code="body_too_large")
    except ClientDisconnect as error:
        raise FrontError("the client has gone", code="cancelled") from error
    return bytes(body)


async def _on_front_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, FrontError):
        raise error
    return JSONResponse(error_body(error.code, str(error), param=error.param), status_of(error.code))


async def _on_not_found(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    return JSONResponse(error_body("not_found", "there is no such endpoint"), status)


async def _on_bug(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body("engine_failure", "the server failed; see its log"), 500)
