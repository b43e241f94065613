"""The engine process's client: what every Triton stub, the OpenAI front and the launcher hold.

One background thread reads; it reconnects with back-off when the engine process ends, after telling every open request
so. Nothing here needs more than the standard library and msgpack.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from trtllm_dspark.serving.framing import PROTOCOL_VERSION, BlockingConnection, Message, ProtocolError, check_hello

logger = logging.getLogger(__name__)

# Receives items of `outputs` frames and errors ({"code", "message"}); called on the client's reader thread.
OnItem = Callable[[Message], None]

ENGINE_UNAVAILABLE = "engine_unavailable"
_PING_S = 0.5
_SILENT_S = 6.0
_BACKOFF_S = (0.05, 0.1, 0.2)


class EngineUnavailable(ConnectionError):
    """The engine process is not connected."""


def is_final(item: Message) -> bool:
    """Whether no further item of the request follows."""
    return "code" in item or "finish_reason" in item


class EngineClient:
    """Connection to the engine process for many concurrent requests.

    Args:
        socket_path: where the engine process listens.
        name: who this is, for the launcher's watch (the model's name).
        role: "stub", "front" or "launcher".
        on_reply: receives messages that belong to no request (metrics, status); called on the reader thread.

    Attributes:
        engine: what the engine process said about itself.
        num_engines: different engine processes seen so far.
        last_error: why the last connection ended or could not be made.
    """

    def __init__(
        self, socket_path: str, *, name: str, role: str = "stub", on_reply: Callable[[Message], None] | None = None
    ) -> None:
        self._socket_path = socket_path
        self._name = name
        self._role = role
        self._on_reply = on_reply
        self._lock = threading.Lock()
        self._connection: BlockingConnection | None = None
        self._open: dict[int, OnItem] = {}
        self._handles = itertools.count(1)
        self._closing = False
        self._connected = threading.Event()
        self.engine: Message = {}
        self.num_engines = 0
        self.last_error = ""
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)

    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the handshake."""
        return self._connected.wait(timeout_s)

    @property
    def connected(self) -> bool:
        """Whether the engine process answered the handshake and has not gone since."""
        return self._connected.is_set()

    @property
    def num_open(self) -> int:
        """Requests without a final item."""
        return len(self._open)

    def close(self) -> None:
        """Disconnect for good; open requests get an error."""
        self._closing = True
        connection = self._connection
        if connection is not None:
            connection.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def reserve_handle(self) -> int:
        """Return a number for a request; needed before `add` where the callback wants to know it."""
        return next(self._handles)

    def add(
        self,
        fields: Message,
        on_item: OnItem,
        *,
        handle: int | None = None,
        request_id: str = "",
        group: int | None = None,
    ) -> int:
        """Send one request; `on_item` gets its items until one is final.

        Args:
            fields: the request (`engine_process.requests`).
            on_item: called on the reader thread.
            handle: from `reserve_handle`.
            request_id: the user's id, for `stop`.
            group: rows of one client request share it (and may share `request_id`).

        Raises:
            EngineUnavailable: there is no engine process now; `on_item` is not called.
            UnsendableMessage: the fields fit no frame; `on_item` is not called.
        """
        handle = next(self._handles) if handle is None else handle
        message = {"type": "add", "id": handle, "fields": fields, "request_id": request_id}
        if group is not None:
            message["group"] = group
        with self._lock:
            connection = self._connection
            if connection is None or not self._connected.is_set():
                raise EngineUnavailable("the engine process is not running")
            self._open[handle] = on_item
        try:
            connection.send(message)
        except ProtocolError:
            with self._lock:
                self._open.pop(handle, None)
            raise
        except OSError as error:
            connection.close()
            with self._lock:
                mine = self._open.pop(handle, None)
            if mine is not None:  # else the reader thread has told the request already
                raise EngineUnavailable("the engine process is gone") from error
        return handle

    def cancel(self, handle: int) -> None:
        """Ask to end a request; its final item still comes."""
        if handle in self._open:
            self.post({"type": "cancel", "id": handle})

    def post(self, message: Message) -> bool:
        """Send a message that expects no item; False when there is no engine process."""
        connection = self._connection
        if connection is None or not self._connected.is_set():
            return False
        try:
            connection.send(message)
        except OSError:
            connection.close()
            return False
        return True

    # the reader thread

    def _run(self) -> None:
        attempt = 0
        while not self._closing:
            try:
                connection = self._connect()
            except (OSError, EOFError, ProtocolError) as error:
                self.last_error = str(error)
                time.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
                attempt += 1
                continue
            attempt = 0
            try:
                self._read(connection)
            except (OSError, EOFError, ProtocolError, ValueError) as error:
                self.last_error = str(error)
            self._disconnected(connection)

    def _connect(self) -> BlockingConnection:
        connection = BlockingConnection(self._socket_path)
        try:
            connection.send(
                {
                    "type": "hello",
                    "protocol": PROTOCOL_VERSION,
                    "role": self._role,
                    "name": self._name,
                    "pid": os.getpid(),
                }
            )
            hello = connection.receive_one(timeout_s=5.0)
            check_hello(hello, peer="the engine process")
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self.num_engines += hello.get("pid") != self.engine.get("pid")
            self.engine = dict(hello.get("engine") or {})
            self.engine["pid"] = hello.get("pid")
            self.engine["started"] = hello.get("started")
            self._connection = connection
            self._connected.set()
        return connection

    def _read(self, connection: BlockingConnection) -> None:
        heard = pinged = time.monotonic()
        messages = connection.take_ready()
        while not self._closing:
            for message in messages:
                self._deliver(message)
            messages = connection.receive(timeout_s=_PING_S)
            now = time.monotonic()
            if messages:
                heard = now
            if now - pinged >= _PING_S:
                connection.send({"type": "ping"})
                pinged = now
            if now - heard > _SILENT_S:
                raise TimeoutError("the engine process does not answer")

    def _deliver(self, message: Message) -> None:
        kind = message["type"]
        if kind == "outputs":
            for item in message["items"]:
                self._deliver_item(item)
        elif kind == "error":
            self._deliver_item(message)
        elif kind != "pong" and self._on_reply is not None:
            self._on_reply(message)

    def _deliver_item(self, item: dict[str, Any]) -> None:
        handle = item.get("id", -1)
        on_item = self._open.get(handle)
        if on_item is None:
            return
        if is_final(item):
            with self._lock:
                self._open.pop(handle, None)
        _call(on_item, item)

    def _disconnected(self, connection: BlockingConnection) -> None:
        with self._lock:
            self._connected.clear()
            self._connection = None
            lost, self._open = self._open, {}
        connection.close()
        for handle, on_item in lost.items():
            item = {
                "id": handle,
                "code": ENGINE_UNAVAILABLE,
                "message": "the engine process ended while it ran this request; retry it",
            }
            _call(on_item, item)


def _call(on_item: OnItem, item: Message) -> None:
    try:
        on_item(item)
    except Exception:  # the reader thread serves every other request too
        logger.exception("the receiver of a request's items failed")
