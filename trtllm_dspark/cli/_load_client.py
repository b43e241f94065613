"""Load a running server over HTTP or gRPC and note what every request got, in open or closed loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from trtllm_dspark.cli._load_grpc import GrpcChannel
from trtllm_dspark.cli._prompts import Prompt
from trtllm_dspark.errors import DeviceError, UsageError
from trtllm_dspark.simulate.records import RequestRecord

Api = Literal["triton", "openai"]
_INPUT_NAMES = {"stop": "stop_words", "max_draft_len": "num_draft_tokens"}
_UNSENDABLE: dict[Api, dict[str, str]] = {
    "triton": {"stop_token_ids": "use stop strings"},
    "openai": {
        "stop_token_ids": "use stop strings",
        "max_draft_len": "use --api triton",
        "speculation": "use --api triton",
    },
}
"""A prompt's own fields that have no name there, and what to use."""
TIMEOUT_S = 600.0
"""Seconds of silence after which a request counts as failed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how requests are sent.

    Attributes:
        host: name or address.
        port: of the HTTP or the gRPC front.
        api: `triton` (generate_stream, or a stream over gRPC) or `openai` (chat completions; completions with `raw`).
        model: name of the model.
        raw: no chat template.
        grpc: whether it speaks gRPC; `triton` only.
    """

    host: str
    port: int
    api: Api
    model: str
    raw: bool = False
    grpc: bool = False

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(url: str, *, api: Api, model: str, raw: bool) -> Endpoint:
        """Read `http://HOST:PORT` or `grpc://HOST:PORT`.

        Raises:
            UsageError: another form, or gRPC with the OpenAI API.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if host is None or port is None or parts.scheme not in ("http", "grpc") or parts.path.strip("/"):
            raise UsageError(f"--url {url} is not understood; use http://HOST:PORT or grpc://HOST:PORT")
        if parts.scheme == "grpc" and api != "triton":
            raise UsageError("the OpenAI API is spoken over HTTP only; use --api triton, or an http:// address")
        return Endpoint(host, port, api, model, raw, parts.scheme == "grpc")

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt with a field of its own that the API has no name for.

        Raises:
            UsageError: it has one.
        """
        for name, instead in _UNSENDABLE[self.api].items():
            if name in prompt.sampling:
                raise UsageError(
                    f"prompt on line {prompt.index + 1}: the {self.api} API takes no {name}; {instead}, or take it out"
                )

    def message(self, prompt: Prompt, sampling: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return path and JSON body of a prompt."""
        fields = {**sampling, **prompt.sampling}
        if self.api == "triton":
            body = {"text_input": prompt.text, "stream": True, "return_num_output_tokens": True, **_inputs(fields)}
            if not self.raw:  # another project's server has no such input: --raw loads that one
                body["apply_chat_template"] = True
            return f"/v2/models/{self.model}/generate_stream", body
        stream = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        if self.raw:
            return "/v1/completions", {"prompt": prompt.text, **stream}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt.text}], **stream}


def _inputs(fields: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters under the names of Triton's inputs."""
    named = {_INPUT_NAMES.get(name, name): value for name, value in fields.items() if name != "speculation"}
    # The one value that a prompt's line may have is "off".
    return named | {"num_draft_tokens": 0} if "speculation" in fields else named


@dataclass(slots=True)
class _Job:
    prompt: Prompt
    record: RequestRecord


@dataclass
class LoadClient:
    """Send requests and keep their records.

    Attributes:
        endpoint: where to.
        sampling: fields of every request; a prompt's own replace them.
        records: one a request, times in seconds from the start of the load.
    """

    endpoint: Endpoint
    sampling: dict[str, Any]
    records: list[RequestRecord] = field(default_factory=list)
    _start: float = 0.0
    _channel: GrpcChannel | None = None

    def run(self, prompts: Sequence[Prompt], *, users: int | None, times: Sequence[float], count: int) -> None:
        """Send `count` requests, the prompts in turn: from so many users, or at the times given.

        Raises:
            DeviceError: nothing listens there.
        """
        asyncio.run(self._run(prompts, users, times, count))

    async def _run(self, prompts: Sequence[Prompt], users: int | None, times: Sequence[float], count: int) -> None:
        jobs = [self._job(prompts[index % len(prompts)], index) for index in range(count)]
        self.records = [job.record for job in jobs]
        if self.endpoint.grpc:
            self._channel = GrpcChannel(self.endpoint.address)
        self._start = time.perf_counter()
        try:
            if users is not None:
                waiting = iter(jobs)
                await asyncio.gather(*(self._user(waiting) for _ in range(users)))
            else:
                await asyncio.gather(*(self._later(job, at) for job, at in zip(jobs, times, strict=True)))
        finally:
            if self._channel is not None:
                await self._channel.close()

    def _job(self, prompt: Prompt, index: int) -> _Job:
        return _Job(prompt, RequestRecord(index, prompt.domain or "", 0.0, 0))

    async def _user(self, jobs: Any) -> None:
        for job in jobs:
            await self._send(job)

    async def _later(self, job: _Job, at: float) -> None:
        await asyncio.sleep(max(0.0, self._start + at - time.perf_counter()))
        await self._send(job)

    async def _send(self, job: _Job) -> None:
        record = job.record
        record.arrival_s = time.perf_counter() - self._start
        try:
            async for event in self._events(*self.endpoint.message(job.prompt, self.sampling)):
                self._note(record, event)
                if record.error:
                    return
        except ConnectionRefusedError as error:
            where = self.endpoint.address
            raise DeviceError(f"nothing listens on {where}; start trtllm-dspark serve first") from error
        except (OSError, asyncio.IncompleteReadError, ValueError, TimeoutError) as error:
            record.error = type(error).__name__
        if not record.error and record.last_token_s is None:
            record.error = "no_output"

    def _note(self, record: RequestRecord, event: dict[str, Any]) -> None:
        now = time.perf_counter() - self._start
        if "error" in event:
            record.error = str(event["error"])
            return
        if self.endpoint.api == "triton":
            tokens = int(event.get("num_output_tokens", 0))
        else:
            usage = event.get("usage")
            if isinstance(usage, dict):
                record.output_tokens = int(usage["completion_tokens"])
                record.prompt_tokens = int(usage["prompt_tokens"])
                return
            tokens = 1 if event.get("choices") else 0
        if tokens <= 0:
            return
        if record.first_token_s is None:
            record.first_token_s = now
        elif self.endpoint.api == "triton":
            # One event a round: what it holds beyond one token are accepted drafts.
            record.rounds += 1
            record.accepted += tokens - 1
        record.last_token_s = now
        record.output_tokens += tokens

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of every server-sent event, or what a response holds; one `error` event when it is refused."""
        if self._channel is not None:
            async for event in self._channel.events(self.endpoint.model, body, timeout_s=TIMEOUT_S):
                yield event
            return
        reader, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port, limit=1 << 22)
        try:
            data = json.dumps(body).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {self.endpoint.host}\r\nContent-Type: application/json\r\n"
                f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
            header = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)).decode("latin-1")
            status = int(header.split(" ", 2)[1])
            chunked = "transfer-encoding: chunked" in header.lower()
            rest = b""
            async for piece in _body(reader, chunked=chunked):
                rest += piece
                if status != 200:
                    continue
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
                        yield json.loads(text)
            if status != 200:
                yield {"error": f"HTTP {status}: {rest[:300].decode('utf-8', 'replace')}"}
        finally:
            writer.close()


async def _body(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the pieces of a response's body."""
    while True:
        if not chunked:
            piece = await asyncio.wait_for(reader.read(1 << 16), TIMEOUT_S)
        else:
            size = int((await asyncio.wait_for(reader.readline(), TIMEOUT_S)).split(b";")[0].strip() or b"0", 16)
            piece = (await reader.readexactly(size + 2))[:-2] if size else b""
        if not piece:
            return
        yield piece
