"""Length-checked msgpack frames over a Unix socket: what the engine process and its clients speak.

A frame is a 4-byte big-endian length and that many bytes of msgpack, one map with a `type`. The first frame in each
direction is a `hello` that carries `PROTOCOL_VERSION`; a peer of another version is refused by both sides.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack

from trtllm_dspark.errors import DsparkError, shown

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 32 * 1024 * 1024
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class ProtocolError(DsparkError):
    """The peer sent something that is not a frame of this protocol; the connection must be closed."""


class UnsendableMessage(ProtocolError):
    """A message of ours fits no frame, and nothing was sent; the connection is as good as before.

    Attributes:
        code: of the request that asked for it.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


def pack(message: Message, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Serialise one message to a frame.

    Raises:
        UnsendableMessage: the message is larger than `max_bytes`, or holds an integer beyond 64 bits, half a surrogate
            pair or another value that has no form in a frame.
    """
    try:
        body: bytes = msgpack.packb(message, use_bin_type=True)
    except (OverflowError, TypeError, ValueError) as error:
        raise UnsendableMessage(f"a value of the request has no binary form ({error})", code="invalid_value") from error
    if len(body) > max_bytes:
        raise UnsendableMessage(
            f"a message of {len(body)} bytes exceeds the frame limit of {max_bytes} bytes", code="prompt_too_large"
        )
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cut a byte stream into messages; never buffers more than one oversized header says it may."""

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield every complete message, keeping the rest for the next call.

        Raises:
            ProtocolError: a length over the limit, bytes that are not msgpack, or a message that is not a typed map.
        """
        self._buffer += data
        offset = 0
        try:
            while len(self._buffer) - offset >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, offset)
                if length > self._max_bytes:
                    raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {self._max_bytes} bytes")
                end = offset + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[offset + _LENGTH.size : end])
                offset = end
                yield _unpack(body)
        finally:
            del self._buffer[:offset]


def _unpack(body: bytes) -> Message:
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"a frame is not valid msgpack: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("a frame is not a map with a 'type' string")
    return message


def check_hello(message: Message, *, peer: str) -> None:
    """Refuse a first message that is not a hello of this protocol version.

    Raises:
        ProtocolError: naming the peer and both versions.
    """
    if message.get("type") != "hello":
        raise ProtocolError(f"{peer} did not start with a hello")
    if message.get("protocol") != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{peer} speaks protocol {shown(message.get('protocol'))}, this side {PROTOCOL_VERSION}; "
            "restart both from one installation of trtllm-dspark"
        )


class BlockingConnection:
    """One connected Unix socket with whole messages in and out, for clients (the server is non-blocking).

    One thread may receive while others send.
    """

    def __init__(self, path: str, *, timeout_s: float = 5.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._decoder = FrameDecoder()
        self._ready: list[Message] = []
        self._send_lock = threading.Lock()
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def send(self, message: Message) -> None:
        """Send one message; OSError when the peer is gone or does not read for the connection's timeout."""
        data = pack(message)
        with self._send_lock:
            self._socket.sendall(data)

    def receive(self, *, timeout_s: float) -> list[Message]:
        """Return all messages that one read completes, or nothing when `timeout_s` passes without one.

        Raises:
            EOFError: the peer closed the connection.
            ProtocolError: the peer sent garbage.
        """
        if not self._poll.poll(timeout_s * 1000):
            return []
        try:
            data = self._socket.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError("the connection was closed by the peer")
        return list(self._decoder.feed(data))

    def receive_one(self, *, timeout_s: float) -> Message:
        """Wait for exactly one message (the hello); TimeoutError when it does not come."""
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"the peer sent nothing for {timeout_s:g} s")
            self._ready = self.receive(timeout_s=remaining)
        return self._ready.pop(0)

    def take_ready(self) -> list[Message]:
        """Return the messages that arrived together with the one `receive_one` returned."""
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Close the socket and wake a thread that waits in `receive`; calling it twice is harmless."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
