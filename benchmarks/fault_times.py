"""How long a running `trtllm-dspark serve` takes to notice and to mend what dies.

Usage: fault_times.py --engine_dir E [--streams 4] [--repeats 3]

Starts a server of its own and, while streams run, kills (SIGKILL) its engine process, then kills and freezes (SIGSTOP)
a stub. Prints one JSON line: seconds from the signal until every stream had ended, until /v2/health/ready was not 200,
and until it was 200 again and a new request was answered; the median and the largest of the repeats. The engine must
hold sequences long enough that no stream ends by itself meanwhile (build_toy_engine.py --max_seq_len 2048).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench_serving import free_port

from trtllm_dspark.serving.children import children_of, command_line, process_state

_GIVE_UP_S = 120.0


class Stream(threading.Thread):
    """Reads one stream to its end, whatever ends it."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self.has_begun = threading.Event()
        self.ended_at = 0.0
        self.was_complete = False

    def run(self) -> None:
        """Ask for more tokens than come before the fault, and note when nothing more comes."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_GIVE_UP_S)
        fields = {"text_input": "a", "max_tokens": 1 << 20, "stream": True, "num_draft_tokens": 0, "end_id": -1}
        try:
            connection.request("POST", "/v2/models/ensemble/generate_stream", json.dumps(fields))
            for line in connection.getresponse():
                self.has_begun.set()
                self.was_complete |= b'"finish_reason"' in line
        except (OSError, http.client.HTTPException):
            pass  # a closed connection is one way to end
        finally:
            self.ended_at = time.monotonic()
            connection.close()


class Server:
    """One server with one HTTP port."""

    def __init__(self, engine_dir: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "trtllm_dspark.cli.main", "serve", f"--engine_dir={engine_dir}"]
        command += [f"--http_port={self.port}", f"--grpc_port={free_port()}", f"--metrics_port={free_port()}"]
        command += ["--num_threads=1", "--log_level=error"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if self.process.stdout is None or not self.process.stdout.readline().startswith("ready"):
            raise SystemExit("the server did not start")

    def engine(self) -> int:
        """Return the engine process's pid."""
        return next(p for p in children_of(self.process.pid) if "trtllm_dspark.engine_process" in command_line(p))

    def stub(self) -> int:
        """Return the pid of the stub the streams go through."""
        below = (pid for child in children_of(self.process.pid) for pid in children_of(child))
        return next(pid for pid in below if "/ensemble/1/model.py" in command_line(pid))

    def is_ready(self) -> bool:
        """Return what the health endpoint says."""
        return self._request("GET", "/v2/health/ready", "")

    def answers(self) -> bool:
        """Return whether a request is answered."""
        body = json.dumps({"text_input": "a", "max_tokens": 2})
        return self._request("POST", "/v2/models/ensemble/generate", body)

    def _request(self, method: str, path: str, body: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            response.read()
            return response.status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def since(started: float, condition: Callable[[], bool]) -> float:
    """Return the seconds from `started` until a condition holds."""
    while not condition():
        if time.monotonic() - started > _GIVE_UP_S:
            raise SystemExit(f"it took more than {_GIVE_UP_S:g} s")
        time.sleep(0.01)
    return time.monotonic() - started


def fault(server: Server, pid: int, number: signal.Signals, num_streams: int) -> dict[str, float]:
    """Send a signal while streams run and time what follows."""
    streams = [Stream(server.port) for _ in range(num_streams)]
    for stream in streams:
        stream.start()
    for stream in streams:
        if not stream.has_begun.wait(_GIVE_UP_S):
            raise SystemExit("a stream did not begin")
    started = time.monotonic()
    os.kill(pid, number)
    noticed = since(started, lambda: not server.is_ready())
    for stream in streams:
        stream.join(_GIVE_UP_S)
        if stream.was_complete:
            raise SystemExit("a stream ended by itself; build the engine with a larger --max_seq_len")
    again = since(started, lambda: server.is_ready() and server.answers())
    if process_state(pid):
        raise SystemExit(f"process {pid} is still there")
    return {
        "streams_ended_s": max(stream.ended_at for stream in streams) - started,
        "not_ready_s": noticed,
        "ready_again_s": again,
    }


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    server = Server(args.engine_dir)
    faults: dict[str, tuple[Callable[[], int], signal.Signals]] = {
        "engine_killed": (server.engine, signal.SIGKILL),
        "stub_killed": (server.stub, signal.SIGKILL),
        "stub_frozen": (server.stub, signal.SIGSTOP),
    }
    figures = {}
    try:
        for name, (victim, number) in faults.items():
            runs = [fault(server, victim(), number, args.streams) for _ in range(args.repeats)]
            figures[name] = {
                what: {
                    "median": round(statistics.median(run[what] for run in runs), 2),
                    "largest": round(max(run[what] for run in runs), 2),
                }
                for what in runs[0]
            }
    finally:
        server.process.terminate()
        server.process.wait()
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
