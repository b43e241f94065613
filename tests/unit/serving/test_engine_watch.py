"""The launcher's watch over engine processes that are none: who is killed, and how often."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trtllm_dspark.engine_process.connections import Connection, ConnectionServer
from trtllm_dspark.serving import engine_watch
from trtllm_dspark.serving.engine_watch import EngineWatch
from trtllm_dspark.serving.framing import PROTOCOL_VERSION, Message

HANG_S = 5.0


class FakeProcess:
    """A process that answers the launcher and says how old its last progress is."""

    def __init__(self, pid: int, path: str, progress_age_s: float) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.num_asked = 0
        self._age = progress_age_s
        self._server = ConnectionServer(path, self)
        self._server.start()

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self.kill()

    def wait(self, timeout_s: float) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self._server.stop()
            self.returncode = -9

    def hello(self, connection: Connection) -> Message:
        return {"type": "hello", "protocol": PROTOCOL_VERSION, "pid": self.pid, "engine": {}}

    def message(self, connection: Connection, message: Message) -> None:
        if message["type"] == "status":
            self.num_asked += 1
            connection.send({"type": "status", "pid": self.pid, "progress_age_s": self._age, "engine_dir": "e"})
        else:
            connection.send({"type": "pong"})

    def closed(self, connection: Connection) -> None:
        pass


class Fakes:
    """Start a hung process first and healthy ones after it."""

    def __init__(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[FakeProcess] = []
        self._path = path
        monkeypatch.setattr(engine_watch, "spawn", self._spawn)
        monkeypatch.setattr(engine_watch, "kill_tree", lambda process: process.kill())

    def _spawn(self, command: Sequence[str]) -> Any:
        age = 0.0 if self.started else HANG_S + 1.0
        self.started.append(FakeProcess(1000 + len(self.started), self._path, age))
        return self.started[-1]


def make_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineWatch, Fakes]:
    path = str(tmp_path / "s")
    fakes = Fakes(path, monkeypatch)
    return EngineWatch(lambda engine_dir: ["x"], path, hang_timeout_s=HANG_S, start_timeout_s=60.0), fakes


def test_hung_process_is_replaced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, fakes = make_watch(tmp_path, monkeypatch)
    watch.start()
    try:
        deadline = time.monotonic() + 30.0
        while len(fakes.started) < 2 or fakes.started[-1].num_asked < 3:
            assert time.monotonic() < deadline
            watch.poll()
            time.sleep(0.02)
        hung, healthy = fakes.started
        assert (hung.returncode, healthy.returncode, watch.restarts) == (-9, None, 1)
        assert watch.ready
        assert watch.pid == healthy.pid
    finally:
        watch.stop(timeout_s=1.0)


def test_late_status_of_the_process_before_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, fakes = make_watch(tmp_path, monkeypatch)
    fakes.started.append(FakeProcess(1, str(tmp_path / "other"), 0.0))
    watch.start()
    try:
        deadline = time.monotonic() + 30.0
        while not watch.ready:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        watch._receive({"type": "status", "pid": 1, "progress_age_s": HANG_S + 1.0})
        watch.poll()
        assert fakes.started[-1].returncode is None
    finally:
        watch.stop(timeout_s=1.0)
        fakes.started[0].kill()
