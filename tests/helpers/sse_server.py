"""An HTTP server of a few lines that streams events as Triton and the OpenAI front do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class SseServer:
    """Answer every POST with tokens in rounds of three, chunked as HTTP/1.1 allows.

    Attributes:
        bodies: (path, JSON) of every request.
        most_at_once: requests that were open at the same time.
    """

    def __init__(self, *, pause_s: float = 0.002, refuse_after: int | None = None) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.most_at_once = 0
        self._open = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner._lock:
                    owner.bodies.append((self.path, body))
                    owner._open += 1
                    owner.most_at_once = max(owner.most_at_once, owner._open)
                if refuse_after is not None and len(owner.bodies) > refuse_after:
                    self._refuse()
                else:
                    self._stream(owner._events(self.path, body), pause_s)

            def _ends(self) -> None:
                """Count the request as over: before its last bytes, or the client's next one could overtake this."""
                with owner._lock:
                    owner._open -= 1

            def _refuse(self) -> None:
                self._ends()
                text = b'{"error":"the queue is full"}'
                self.send_response(503)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def _stream(self, events: Sequence[str], pause_s: float) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for number, event in enumerate(events, 1):
                    # An event cut in the middle of a line, as a proxy may.
                    data = f"data: {event}\n\n".encode()
                    if number == len(events):
                        self._ends()
                    for piece in (data[:9], data[9:]):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
                    time.sleep(pause_s)
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @staticmethod
    def _events(path: str, body: dict[str, Any]) -> list[str]:
        count = body["max_tokens"]
        sizes = [1, *([3] * ((count - 1) // 3)), *([(count - 1) % 3] if (count - 1) % 3 else [])]
        if path.startswith("/v2/"):
            return [json.dumps({"text_output": "x" * size, "num_output_tokens": size}) for size in sizes]
        chunks = [json.dumps({"choices": [{"text": "x" * size}]}) for size in sizes]
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": 5}})
        return [*chunks, usage, "[DONE]"]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def running(**options: Any) -> Iterator[SseServer]:
    """Yield a server and close it."""
    server = SseServer(**options)
    try:
        yield server
    finally:
        server.close()
