"""A real `trtllm-dspark serve` for tests: unique ports, plain HTTP, process bookkeeping and a check for leftovers."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_dspark.serving.children import children_of, command_line, process_state
from trtllm_dspark.serving.leftovers import PREFIX

MODEL_FILE = re.compile(r"/([A-Za-z0-9_]+)/1/model\.py")


# Below the range that the kernel takes ports for clients from: between the look and the server's bind none of another
# test process may get one.
_FIRST_PORT = 12000 + os.getpid() % 40 * 500
_PORTS = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + 500))


def free_ports(count: int) -> list[int]:
    """Return ports nobody uses now."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_PORTS)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


@dataclass
class Server:
    """One running launcher."""

    engine_dir: Path
    log_path: Path
    flags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.http_port, self.grpc_port, self.metrics_port, self.openai_port = free_ports(4)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def start(self, *, timeout_s: float = 180.0) -> Server:
        command = [
            sys.executable, "-m", "trtllm_dspark.cli.main", "serve", f"--engine_dir={self.engine_dir}",
            f"--http_port={self.http_port}", f"--grpc_port={self.grpc_port}", f"--metrics_port={self.metrics_port}",
            f"--openai_port={self.openai_port}", "--num_threads=1", *self.flags,
        ]  # fmt: skip
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        deadline = time.monotonic() + timeout_s
        said = b""
        while b"ready:" not in said:
            said += self.process.stdout.read() or b""
            assert self.process.poll() is None, f"serve ended: {self.log}"
            assert time.monotonic() < deadline, f"serve was not ready: {self.log}"
            time.sleep(0.05)
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stop(self, *, timeout_s: float = 60.0) -> int:
        """SIGTERM, wait, and check that nothing is left."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.assert_nothing_left()
        return code

    def assert_nothing_left(self, *, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while (left := leftovers(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == [], left

    # processes

    def children(self) -> dict[str, int]:
        """Return the launcher's direct children: `engine`, `front` and `tritonserver`."""
        found = {}
        for pid in children_of(self.pid):
            line = command_line(pid)
            if not line:
                continue  # killed and not yet reaped
            kind = "engine" if "engine_process" in line else "front" if "openai_front" in line else "tritonserver"
            found[kind] = pid
        return found

    def stubs(self) -> dict[str, int]:
        """Return the stub process of each model."""
        found = {}
        for pid in children_of(self.children().get("tritonserver", 0)):
            match = MODEL_FILE.search(command_line(pid))
            if match:
                found[match[1]] = pid
        return found

    # HTTP

    def get(self, path: str, *, port: int | None = None, timeout_s: float = 10.0) -> tuple[int, str]:
        return self._request("GET", path, None, port or self.http_port, timeout_s)

    def ready(self) -> int:
        """Return the status of /v2/health/ready, 0 when nothing answers."""
        try:
            return self.get("/v2/health/ready", timeout_s=2.0)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def wait_ready(self, *, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.ready() != 200:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def metric(self, name: str, **labels: str) -> float:
        """Return one series of /metrics (0 when it does not exist yet)."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.get("/metrics", port=self.metrics_port)[1].splitlines():
            match = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
            if match and match[1] == name and wanted <= set(match[2].split(",")):
                return float(match[3])
        return 0.0

    def post(self, path: str, body: bytes, *, timeout_s: float = 60.0) -> tuple[int, str]:
        return self._request("POST", path, body, self.http_port, timeout_s)

    def generate(self, model: str = "ensemble", **fields: Any) -> tuple[int, dict[str, Any]]:
        status, text = self.post(f"/v2/models/{model}/generate", json.dumps(fields).encode())
        return status, json.loads(text)

    def generate_text(self, prompt: str, max_tokens: int, model: str = "ensemble", **fields: Any) -> str:
        status, answer = self.generate(model, text_input=prompt, max_tokens=max_tokens, **fields)
        assert status == 200, answer
        return str(answer["text_output"])

    def events(self, model: str = "ensemble", **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the server-sent events of generate_stream; bytes that are not UTF-8 fail."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=60.0)
        try:
            connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(fields).encode())
            for line in connection.getresponse():
                if line.strip():
                    assert line.startswith(b"data: ") or line.startswith(b"{"), line
                    yield json.loads(line.removeprefix(b"data: ").decode("utf-8"))
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: bytes | None, port: int, timeout_s: float) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8")
        finally:
            connection.close()


def error_code(answer: dict[str, Any]) -> str:
    """Return the machine-readable code at the start of an error message."""
    match = re.match(r"\[(\w+)\] ", answer.get("error", ""))
    return match[1] if match else f"no code in {answer}"


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait until a condition holds; fail when it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def leftovers(launcher_pid: int) -> list[str]:
    """Return processes, shared memory and directories that belong to a launcher."""
    mark = f"{PREFIX}_{launcher_pid}_"
    found = [str(path) for parent in ("/dev/shm", "/tmp") for path in Path(parent).glob(f"{mark}*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and mark in command_line(int(entry.name)) and process_state(int(entry.name)):
            found.append(f"process {entry.name}: {command_line(int(entry.name))}")
    return found
