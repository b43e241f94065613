"""The engine process's Unix socket: one I/O thread, non-blocking, bounded buffers."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from trtllm_dspark.engine_process.frames import frames_of
from trtllm_dspark.errors import UsageError, cut
from trtllm_dspark.serving.framing import FrameDecoder, Message, ProtocolError, check_hello

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""What may wait for a client that takes nothing; the long answers of one round may be more."""
STALLED_S = 2.0
_MAX_BACKLOG_BYTES = 16 * MAX_UNSENT_BYTES
_READ_BYTES = 1 << 18
_ACCEPT_PAUSE_S = 0.5


class Handler(Protocol):
    """What happens with what clients send; called on the I/O thread."""

    def hello(self, connection: Connection) -> Message:
        """Return the server's side of the handshake."""
        ...

    def message(self, connection: Connection, message: Message) -> None:
        """Act on one message after the handshake."""
        ...

    def closed(self, connection: Connection) -> None:
        """Forget everything the connection owned."""
        ...


class Connection:
    """One client. `send` may be called from any thread and never blocks or raises."""

    def __init__(self, connection_id: int, sock: socket.socket, wake: Callable[[Connection], None]) -> None:
        self.connection_id = connection_id
        self.sock = sock
        self.decoder = FrameDecoder()
        self.role = ""
        self.name = ""
        self.pid = 0
        self.greeted = False
        self.last_heard = time.monotonic()
        self.dead = False
        self._wake = wake
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._taken_at = time.monotonic()

    def send(self, message: Message) -> None:
        """Write a message now if the socket takes it, else keep the rest for the I/O thread.

        What fits no frame is answered in its place (`frames_of`).
        """
        data = b"".join(frames_of(message))
        if not data:
            return
        with self._lock:
            if self.dead:
                return
            if not self._unsent:
                try:
                    sent = self.sock.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    self.dead = True
                    self._wake(self)
                    return
                self._taken_at = time.monotonic()
                if sent == len(data):
                    return
                data = data[sent:]
            self._unsent += data
            stalled = time.monotonic() - self._taken_at > STALLED_S
            if len(self._unsent) > (MAX_UNSENT_BYTES if stalled else _MAX_BACKLOG_BYTES):
                logger.warning("%s does not read its responses; its connection is closed", self.name or "a client")
                self.dead = True
        self._wake(self)

    def flush(self) -> None:
        """Write what is left; called by the I/O thread when the socket is writable."""
        with self._lock:
            if not self._unsent or self.dead:
                return
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.dead = True
                return
            self._taken_at = time.monotonic()
            del self._unsent[:sent]

    def close(self) -> None:
        """Close the socket; under the lock, so that no `send` writes to a descriptor the next client has got."""
        with self._lock:
            self.dead = True
            self.sock.close()

    @property
    def has_unsent(self) -> bool:
        """Whether the I/O thread has to wait for writability."""
        return bool(self._unsent)


class ConnectionServer:
    """Listen on a Unix socket and hand messages to a handler.

    Args:
        path: where to listen; a socket file nobody listens on any more is replaced.
        handler: receives everything.

    Raises:
        UsageError: the path is too long, not writable, or another process listens there.
    """

    def __init__(self, path: str, handler: Handler) -> None:
        self._path = path
        self._handler = handler
        self._listener = _listen(path)
        self._selector = selectors.DefaultSelector()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_receive, selectors.EVENT_READ, None)
        self._connections: dict[int, Connection] = {}
        self._attention: set[Connection] = set()
        self._attention_lock = threading.Lock()
        self._next_id = 1
        self._accept_again_at: float | None = None
        self._accept_failed = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)

    def start(self) -> None:
        """Start the I/O thread."""
        self._thread.start()

    def stop(self, *, timeout_s: float = 2.0) -> None:
        """Write what is unsent, close every connection and remove the socket file."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(
            c.has_unsent and not c.dead for c in list(self._connections.values())
        ):
            time.sleep(0.01)
        self._stopping = True
        self._wake(None)
        self._thread.join(timeout_s)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    @property
    def connections(self) -> list[Connection]:
        """Connected clients."""
        return list(self._connections.values())

    def _wake(self, connection: Connection | None) -> None:
        if connection is not None:
            with self._attention_lock:
                self._attention.add(connection)
        with contextlib.suppress(OSError):
            self._wake_send.send(b"x")

    def _run(self) -> None:
        while not self._stopping:
            self._resume_accepting()
            for key, events in self._selector.select(timeout=1.0 if self._accept_again_at is None else _ACCEPT_PAUSE_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_receive:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_receive.recv(4096)
                else:
                    self._serve(key.data, events)
            with self._attention_lock:
                attention, self._attention = self._attention, set()
            for connection in attention:
                self._update(connection)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._listener.close()

    def _resume_accepting(self) -> None:
        if self._accept_again_at is not None and time.monotonic() >= self._accept_again_at:
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError, InterruptedError):
            return
        except OSError as error:
            # Out of descriptors or memory: the client stays in the backlog and would wake this thread for ever.
            if not self._accept_failed:
                logger.warning("cannot accept a client (%s); raise the limit of open files", error.strerror)
            self._accept_failed = True
            self._accept_again_at = time.monotonic() + _ACCEPT_PAUSE_S
            self._selector.unregister(self._listener)
            return
        self._accept_failed = False
        sock.setblocking(False)
        connection = Connection(self._next_id, sock, self._wake)
        self._next_id += 1
        self._connections[connection.connection_id] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if events & selectors.EVENT_READ and not connection.dead:
            try:
                data = connection.sock.recv(_READ_BYTES)
                if not data:
                    connection.dead = True
                for message in connection.decoder.feed(data):
                    self._dispatch(connection, message)
            except BlockingIOError:
                pass
            except ProtocolError as error:
                logger.warning("closing a connection: %s", error)
                connection.dead = True
            except OSError:
                connection.dead = True
            except Exception:  # whatever one client sent, the others go on
                logger.exception("closing a connection")
                connection.dead = True
        self._update(connection)

    def _dispatch(self, connection: Connection, message: Message) -> None:
        connection.last_heard = time.monotonic()
        if connection.greeted:
            self._handler.message(connection, message)
            return
        check_hello(message, peer="a client")
        connection.role = cut(str(message.get("role", "")))
        connection.name = cut(str(message.get("name", "")))
        pid = message.get("pid")
        connection.pid = pid if isinstance(pid, int) else 0
        connection.greeted = True
        connection.send(self._handler.hello(connection))

    def _update(self, connection: Connection) -> None:
        if connection.connection_id not in self._connections:
            return
        if connection.dead:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: Connection) -> None:
        del self._connections[connection.connection_id]
        self._selector.unregister(connection.sock)
        connection.close()
        self._handler.closed(connection)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                try:
                    probe.connect(path)
                except OSError:
                    os.unlink(path)
                else:
                    raise UsageError(f"another engine process listens on {path}; stop it or choose another --socket")
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on the socket {path} ({error.strerror or error}); choose a writable path under 100 "
            "characters with --socket"
        ) from error
    except UsageError:
        listener.close()
        raise
    return listener
