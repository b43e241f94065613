"""`trtllm-dspark serve`: one engine process, one tritonserver, and the watch over both and over Triton's stubs."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_dspark.errors import DeviceError
from trtllm_dspark.serving.children import children_of, command_line, kill_stubs, kill_tree, process_state, spawn
from trtllm_dspark.serving.contract import GATE_MODEL, MODELS
from trtllm_dspark.serving.engine_watch import EngineWatch
from trtllm_dspark.serving.front_watch import FrontWatch, check_front_packages
from trtllm_dspark.serving.gate import ReadinessGate
from trtllm_dspark.serving.leftovers import PREFIX, hold_lock, remove_shared_memory, remove_stale_leftovers
from trtllm_dspark.serving.model_repository import write_repository
from trtllm_dspark.serving.tritonserver import (
    ServerAddress,
    TritonInstallation,
    check_ports,
    find_preload_library,
    find_tritonserver,
    server_command,
    server_environment,
)

logger = logging.getLogger(__name__)

STUB_SILENT_S = 3.0
STATUS_FRESH_S = 1.5
SERVER_START_TIMEOUT_S = 120.0
_POLL_S = 0.1
_CHILDREN_S = 2.0
_MAX_FAILED_SERVERS = 3


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `serve` was asked for.

    Attributes:
        address: Triton's ports.
        max_batch_size: batch rows one Triton request may carry.
        model_repository: where to write the repository; a temporary directory when None.
        exclude_input_in_output: whether outputs leave the prompt out where a request does not say.
        drain_timeout_s: how long SIGTERM waits for requests in flight.
        engine_start_timeout_s: how long the first start of the engine may take.
        hang_timeout_s: longest round before the engine counts as hung.
        openai_port: port of the OpenAI-compatible front, or None for no front.
        triton_flags: further flags for tritonserver.
        verbose: tritonserver logs at info level.
        cancellation_check_period_ms: how often the stubs look for cancelled requests.
    """

    address: ServerAddress
    max_batch_size: int = 64
    model_repository: Path | None = None
    exclude_input_in_output: bool = True
    drain_timeout_s: int = 30
    engine_start_timeout_s: float = 600.0
    hang_timeout_s: float = 60.0
    cancellation_check_period_ms: int = 20
    openai_port: int | None = None
    triton_flags: Sequence[str] = field(default=())
    verbose: bool = False


class Launcher:
    """Run everything until SIGTERM or SIGINT.

    Args:
        options: see `ServeOptions`.
        engine_command: (socket path, engine directory) -> argv of the engine process; the directory is "" at first.
        on_ready: called once when the server is ready.
    """

    def __init__(
        self,
        options: ServeOptions,
        engine_command: Callable[[str, str], Sequence[str]],
        *,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._engine_command = engine_command
        self._on_ready = on_ready
        self._signals = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._server_was_ready = False
        self._server_started = 0.0
        self._announced = False
        self._failed_servers = 0
        self._known_stubs: dict[str, int] = {}
        self._server_children: set[int] = set()
        self._live_children: list[int] = []
        self._children_at = 0.0
        self._stopped_since: dict[int, float] = {}
        self._control_key = secrets.token_hex(16)
        self._control_key_file = Path()
        self._preload = Path()
        # Not the pid alone: launchers of two containers may share /dev/shm.
        self._prefix = f"{PREFIX}_{os.getpid()}_{secrets.token_hex(4)}_"

    def run(self) -> int:
        """Serve until told to stop and return 0.

        Raises:
            UsageError: a port is in use, tritonserver is missing, the repository cannot be written.
            DeviceError: engine or server do not start, or end again and again.
        """
        address = self._options.address
        ports = {
            "--http_port": address.http_port,
            "--grpc_port": address.grpc_port,
            "--metrics_port": address.metrics_port,
        }
        if self._options.openai_port is not None:
            check_front_packages()
            ports["--openai_port"] = self._options.openai_port
        check_ports(address.host, ports)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        remove_stale_leftovers()
        with hold_lock(self._prefix):
            work = Path(tempfile.mkdtemp(prefix=self._prefix))
            try:
                return self._run(work)
            finally:
                kill_stubs(self._prefix)
                shutil.rmtree(work, ignore_errors=True)
                remove_shared_memory(self._prefix)

    def _run(self, work: Path) -> int:
        options = self._options
        installation = find_tritonserver(work)
        self._preload = find_preload_library()
        self._control_key_file = work / "control_key"  # in a directory that only this user enters
        self._control_key_file.write_text(self._control_key)
        socket_path = str(work / "engine.sock")
        repository = options.model_repository or work / "repository"
        write_repository(
            repository,
            {
                "engine_socket": socket_path,
                "ready_file": f"{socket_path}.ready",
                "max_batch_size": str(options.max_batch_size),
                "exclude_input_in_output": str(options.exclude_input_in_output).lower(),
                "cancellation_check_period_ms": str(options.cancellation_check_period_ms),
            },
        )
        engine = EngineWatch(
            functools.partial(self._engine_command, socket_path),
            socket_path,
            hang_timeout_s=options.hang_timeout_s,
            start_timeout_s=options.engine_start_timeout_s,
        )
        front = FrontWatch(options.address, options.openai_port, socket_path, drain_s=options.drain_timeout_s)
        try:
            engine.start()
            code = self._wait_for_engine(engine)
            if code is not None:
                return code
            gate = ReadinessGate(
                options.address.http_target, options.address.http_port, self._control_key, Path(f"{socket_path}.ready")
            )
            while not self._signals:
                engine.poll()
                settled = self._settled(engine)
                gate.set(settled)
                engine.settled = settled and self._server_was_ready
                front.poll()
                self._watch_server(installation, repository, engine, gate, front)
                time.sleep(_POLL_S)
            self._drain(front)
            return 0
        finally:
            self._kill_server()
            front.kill()
            engine.stop(timeout_s=5.0)

    def _wait_for_engine(self, engine: EngineWatch) -> int | None:
        """Wait for the first start; return an exit code when it is over before it began."""
        deadline = time.monotonic() + self._options.engine_start_timeout_s
        while not engine.ready:
            if self._signals:
                return 0
            code = engine.exit_code
            if code is not None:
                # It has said why on stderr; a wrong engine directory does not get better by trying again.
                return code if code > 0 else 4
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"the engine process was not ready after {self._options.engine_start_timeout_s:g} s; raise "
                    "--engine_start_timeout or look at its messages above"
                )
            time.sleep(0.02)
        return None

    def _settled(self, engine: EngineWatch) -> bool:
        """Whether the engine answers and every stub has found it again."""
        if not engine.ready:
            return False
        if self._server is None or not self._server_was_ready:
            return True
        stubs, _ = engine.stubs()
        connected = {stub["name"] for stub in stubs if stub["pid"] == self._known_stubs.get(stub["name"])}
        return connected >= set(self._known_stubs)

    # tritonserver

    def _watch_server(
        self,
        installation: TritonInstallation,
        repository: Path,
        engine: EngineWatch,
        gate: ReadinessGate,
        front: FrontWatch,
    ) -> None:
        server = self._server
        if server is None:
            # Models that load without an engine are harmless, but a gate that fails to load ends a starting server.
            if engine.ready:
                self._start_server(installation, repository)
            return
        if server.poll() is not None:
            self._restart_server(f"tritonserver ended with code {server.returncode}")
            return
        self._list_children(server)
        self._learn_stubs(engine)
        if not self._server_was_ready:
            if time.monotonic() - self._server_started > SERVER_START_TIMEOUT_S:
                self._restart_server(f"tritonserver was not ready after {SERVER_START_TIMEOUT_S:g} s")
            elif len(self._known_stubs) == len(MODELS) and front.is_ready() and gate.is_ready():
                self._server_was_ready, self._failed_servers = True, 0
                logger.info("ready")
                if not self._announced:
                    self._announced = True
                    self._on_ready()
            return
        problem = self._stub_problem(engine)
        if problem:
            self._restart_server(problem)
            return
        stubs, age = engine.stubs()
        if age < STATUS_FRESH_S:
            gate.note_stub(any(stub["name"] == GATE_MODEL for stub in stubs))

    def _start_server(self, installation: TritonInstallation, repository: Path) -> None:
        options = self._options
        command = server_command(
            installation,
            repository,
            options.address,
            shm_prefix=self._prefix,
            control_key_file=self._control_key_file,
            drain_s=options.drain_timeout_s,
            verbose=options.verbose,
            extra=options.triton_flags,
        )
        self._known_stubs.clear()
        self._stopped_since.clear()
        self._server_was_ready = False
        self._server_started = time.monotonic()
        self._server = spawn(command, env=server_environment(installation, preload=self._preload))

    def _restart_server(self, why: str) -> None:
        server = self._server
        if server is None:
            return
        self._failed_servers += 0 if self._server_was_ready else 1
        if self._failed_servers >= _MAX_FAILED_SERVERS:
            raise DeviceError(f"{why} {self._failed_servers} times before it was ready; its messages are above")
        logger.warning("%s; tritonserver is started again", why)
        self._kill_server()
        remove_shared_memory(self._prefix)
        time.sleep(0.5 * self._failed_servers)

    def _kill_server(self) -> None:
        """Kill what is left of tritonserver; a stub that outlived it is recognised by the prefix in its arguments."""
        if self._server is not None:
            orphans = [pid for pid in self._server_children if self._prefix in command_line(pid)]
            kill_tree(self._server, orphans=orphans)
        self._server = None
        self._server_children.clear()
        self._live_children = []

    def _list_children(self, server: subprocess.Popen[bytes]) -> None:
        """Look for tritonserver's children; seldom once it is ready, since every one of its threads may have some."""
        now = time.monotonic()
        if self._server_was_ready and now - self._children_at < _CHILDREN_S:
            return
        self._children_at = now
        self._live_children = children_of(server.pid)
        self._server_children.update(self._live_children)

    def _learn_stubs(self, engine: EngineWatch) -> None:
        """Note which process serves which model; the gate's comes and goes and is not watched."""
        if len(self._known_stubs) == len(MODELS):
            return
        published = {spec.name for spec in MODELS}
        for stub in engine.stubs()[0]:
            if stub["name"] in published and stub["pid"] in self._live_children:
                self._known_stubs[stub["name"]] = stub["pid"]

    def _stub_problem(self, engine: EngineWatch) -> str:
        """Return what is wrong with a stub, or "": Triton itself neither notices nor revives one."""
        now = time.monotonic()
        for pid in self._live_children:
            if process_state(pid) in ("t", "T"):
                if now - self._stopped_since.setdefault(pid, now) > STUB_SILENT_S / 2:
                    return f"the stub process {pid} is stopped"
            else:
                self._stopped_since.pop(pid, None)
        stubs, age = engine.stubs()
        if engine.ready and age < STATUS_FRESH_S:
            for stub in stubs:
                if self._known_stubs.get(stub["name"]) == stub["pid"] and stub["silent_s"] > STUB_SILENT_S:
                    return f"the stub of model {stub['name']} does not answer"
        for name, pid in self._known_stubs.items():
            if not process_state(pid):
                return f"the stub of model {name} ended"
        return ""

    # the end

    def _drain(self, front: FrontWatch) -> None:
        logger.info("stopping; requests in flight may finish for %d s", self._options.drain_timeout_s)
        front.terminate()
        server = self._server
        if server is not None:
            server.terminate()
        deadline = time.monotonic() + self._options.drain_timeout_s + 10.0
        while time.monotonic() < deadline and self._signals < 2:
            if front.ended and (server is None or server.poll() is not None):
                break
            time.sleep(0.05)
        front.kill()
        self._kill_server()

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signals += 1
