"""Messages of clients -> validated requests for the loop; status and metrics on demand."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtllm_dspark.engine_process.connections import Connection
from trtllm_dspark.engine_process.loop import EngineLoop
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.requests import PromptEncoder, RequestLimits, parse_request
from trtllm_dspark.engine_process.streams import Stream, StreamState
from trtllm_dspark.engine_process.swap import DrafterSwap, TrialOptions
from trtllm_dspark.errors import RequestError, UsageError, cut
from trtllm_dspark.serving.framing import PROTOCOL_VERSION, Message

logger = logging.getLogger(__name__)

_MAX_INTAKE = 4096
_MAX_REQUEST_ID = 256
_MAX_PATH = 4096


class EngineService:
    """The handler behind the socket (`connections.Handler`).

    Args:
        loop: runs the requests.
        encoder: tokenizer and chat template.
        limits: what a request may ask for.
        metrics: counters.
        info: facts about the engine for the hello, for example its model name.

    Attributes:
        swap: what exchanges the drafter on request, where the process can.
    """

    def __init__(
        self,
        loop: EngineLoop,
        encoder: PromptEncoder,
        limits: RequestLimits,
        metrics: EngineMetrics,
        info: Mapping[str, Any],
    ) -> None:
        self._loop = loop
        self._encoder = encoder
        self._limits = limits
        self._metrics = metrics
        self._info = dict(info)
        self.swap: DrafterSwap | None = None
        self._streams: dict[tuple[int, int], Stream] = {}
        self._by_request_id: dict[str, list[Stream]] = {}
        self._clients: dict[int, Connection] = {}
        self._intake: queue.Queue[tuple[Stream, Mapping[str, Any]]] = queue.Queue(maxsize=_MAX_INTAKE)
        self._session_ids = itertools.count(1)
        self._started = time.time()
        self._sweep_at = 0
        threading.Thread(target=self._run_intake, name="engine-intake", daemon=True).start()

    def serves(self, *, max_batch_size: int, max_draft_len: int) -> None:
        """Take over what another serving engine changes."""
        self._info = {**self._info, "max_batch_size": max_batch_size, "max_draft_len": max_draft_len}
        self._limits = replace(self._limits, max_draft_len=max_draft_len)

    # connections.Handler, on the I/O thread

    def hello(self, connection: Connection) -> Message:
        """Describe the engine to a new client."""
        self._clients[connection.connection_id] = connection
        return {
            "type": "hello",
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "started": self._started,
            "engine": self._info,
        }

    def message(self, connection: Connection, message: Message) -> None:
        """Act on one message; an unknown type is answered, not fatal."""
        kind = message["type"]
        if kind == "add":
            self._add(connection, message)
        elif kind == "cancel":
            stream = self._streams.get((connection.connection_id, _integer(message.get("id"))))
            if stream is not None:
                self._loop.cancel(stream, "client")
        elif kind == "stop":
            count = self._stop_by_id(message.get("request_id"))
            connection.send({"type": "stopped", "id": _integer(message.get("id")), "count": count})
        elif kind == "rejected":
            # A model refused a request by itself; only counted here.
            self._metrics.add("dspark_requests_received")
            self._metrics.add("dspark_requests_rejected", reason=str(message.get("code"))[:64])
        elif kind == "ping":
            connection.send({"type": "pong"})
        elif kind == "metrics":
            connection.send({"type": "metrics", "started": self._started, "series": self._metrics.snapshot()})
        elif kind == "status":
            connection.send(self.status())
        elif kind in ("swap", "swap_abort", "swap_status"):
            connection.send(self._swap(kind, message))
        else:
            handle = _integer(message.get("id"))
            connection.send({"type": "error", "id": handle, "code": "unknown_type", "message": "unknown type"})

    def closed(self, connection: Connection) -> None:
        """Cancel everything a client that is gone had open."""
        self._clients.pop(connection.connection_id, None)
        for key in [key for key in self._streams if key[0] == connection.connection_id]:
            stream = self._streams.pop(key)
            if stream.state is not StreamState.DONE:
                self._loop.cancel(stream, "disconnected")

    def status(self) -> Message:
        """Return what the launcher watches."""
        now = time.monotonic()
        return {
            "type": "status",
            "pid": os.getpid(),
            "waiting": self._loop.num_waiting,
            "running": self._loop.num_running,
            "rounds": self._loop.rounds,
            "progress_age_s": now - self._loop.last_progress,
            "engine_dir": self._loop.lanes.serving.engine_dir,
            "clients": [
                {"role": c.role, "name": c.name, "pid": c.pid, "silent_s": now - c.last_heard}
                for c in list(self._clients.values())
            ],
        }

    def _swap(self, kind: str, message: Message) -> Message:
        """Start or end the trial of another drafter and say how it stands."""
        if self.swap is None:
            return {"type": "swap", "error": "this engine process cannot exchange its drafter"}
        try:
            if kind == "swap":
                engine_dir = str(message.get("engine_dir", ""))
                if len(engine_dir) > _MAX_PATH:
                    raise UsageError(f"engine_dir is longer than {_MAX_PATH} characters; give a path")
                self.swap.start(engine_dir, TrialOptions(**message.get("options", {})))
            elif kind == "swap_abort":
                self.swap.abort()
        except (UsageError, TypeError) as error:
            return {"type": "swap", "error": cut(str(error), length=300)}
        return {"type": "swap", **self.swap.status()}

    # requests

    def _add(self, connection: Connection, message: Message) -> None:
        handle = _integer(message.get("id"))
        user_id = message.get("request_id")
        stream = Stream(
            send=connection.send,
            connection_id=connection.connection_id,
            handle=handle,
            session_id=str(next(self._session_ids)),
            request_id=user_id if isinstance(user_id, str) else "",
            arrival=time.monotonic(),
            group=_integer(message.get("group", handle)),
        )
        self._metrics.add("dspark_requests_received")
        fields = message.get("fields")
        try:
            if not isinstance(fields, dict):
                raise RequestError("a request carries no fields", code="invalid_type")
            self._claim_id(stream)
            self._streams[connection.connection_id, handle] = stream
            self._intake.put_nowait((stream, fields))
        except queue.Full:
            self._reject(stream, RequestError("too many requests arrive at once; retry later", code="queue_full"))
        except RequestError as error:
            self._reject(stream, error)
        self._sweep()

    def _claim_id(self, stream: Stream) -> None:
        if not stream.request_id:
            return
        if len(stream.request_id) > _MAX_REQUEST_ID:
            raise RequestError(f"the request id is longer than {_MAX_REQUEST_ID} characters", code="out_of_range")
        holders = [s for s in self._by_request_id.get(stream.request_id, []) if s.state is not StreamState.DONE]
        if any((s.connection_id, s.group) != (stream.connection_id, stream.group) for s in holders):
            raise RequestError(
                "the request id is in use by an unfinished request; choose another one", code="duplicate_request_id"
            )
        self._by_request_id[stream.request_id] = [*holders, stream]

    def _stop_by_id(self, request_id: Any) -> int:
        streams = [s for s in self._by_request_id.get(str(request_id), []) if s.state is not StreamState.DONE]
        for stream in streams:
            self._loop.cancel(stream, "stop_request")
        return len(streams)

    def _sweep(self) -> None:
        """Forget finished streams now and then; their tables are only touched on the I/O thread."""
        self._sweep_at += 1
        if self._sweep_at < 256:
            return
        self._sweep_at = 0
        self._streams = {k: s for k, s in self._streams.items() if s.state is not StreamState.DONE}
        kept = {i: [s for s in group if s.state is not StreamState.DONE] for i, group in self._by_request_id.items()}
        self._by_request_id = {i: group for i, group in kept.items() if group}

    def _run_intake(self) -> None:
        while True:
            self._read_next()

    def _read_next(self) -> None:
        """Take one request in, whatever it is: a thread that ends would leave all later ones without an answer."""
        stream, fields = self._intake.get()
        try:
            if stream.cancel_reason is None:
                stream.request = parse_request(fields, self._limits, self._encoder)
                if stream.request.timeout_s is not None:
                    stream.deadline = stream.arrival + stream.request.timeout_s
            self._loop.submit(stream)
        except RequestError as error:
            self._refuse(stream, error)
        except Exception:
            logger.exception("a request could not be read")
            self._refuse(stream, RequestError("the request could not be read", code="invalid_request"))

    def _refuse(self, stream: Stream, error: RequestError) -> None:
        try:
            self._reject(stream, error)
        except Exception:
            logger.exception("a refusal could not be sent")

    def _reject(self, stream: Stream, error: RequestError) -> None:
        self._metrics.add("dspark_requests_rejected", reason=error.code)
        stream.fail(error.code, str(error))


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else -1
