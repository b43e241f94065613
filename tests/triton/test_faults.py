"""Killed and frozen processes: streams end, readiness tells the truth, everything comes back, nothing is left."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.triton_server import Server, error_code, leftovers, wait_for

from trtllm_dspark.serving.children import command_line
from trtllm_dspark.serving.leftovers import PREFIX

LONG = {"text_input": "a", "max_tokens": 2000, "num_draft_tokens": 0, "stream": True}


class Streams:
    """Clients that read until their stream ends, one way or another."""

    def __init__(self, server: Server, count: int, **fields: Any) -> None:
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self.broken: list[Exception] = []
        self._threads = [threading.Thread(target=self._read, args=(server, fields, events)) for events in self.events]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: all(len(events) > 3 for events in self.events))

    def _read(self, server: Server, fields: dict[str, Any], events: list[dict[str, Any]]) -> None:
        try:
            for event in server.events(**{**LONG, **fields}):
                events.append(event)
        except Exception as error:
            self.broken.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30.0)
            assert not thread.is_alive(), "a stream never ended"

    @property
    def last_codes(self) -> set[str]:
        return {error_code(events[-1]) for events in self.events}


def read_until_ready_changes(server: Server, pause_s: float = 0.02) -> list[int]:
    """Return the readiness statuses in order, from not ready to ready again."""
    seen = [server.ready()]
    deadline = time.monotonic() + 30.0
    while not (seen[-1] == 200 and len(seen) > 1):
        assert time.monotonic() < deadline
        status = server.ready()
        if status != seen[-1]:
            seen.append(status)
        time.sleep(pause_s)
    return seen


def test_engine_killed_streams_end_with_error_health_is_red_then_green(start_server: Callable[..., Server]) -> None:
    server = start_server()
    before = server.children()
    streams = Streams(server, 4)
    os.kill(before["engine"], signal.SIGKILL)
    seen = read_until_ready_changes(server)
    streams.join()
    assert streams.last_codes == {"engine_unavailable"}
    assert 400 in seen
    after = server.children()
    assert after["tritonserver"] == before["tritonserver"]
    assert after["engine"] != before["engine"]
    assert server.generate_text("a", 5) == "bcdef"
    wait_for(lambda: server.metric("dspark_engine_restarts") == 1)
    assert server.metric("dspark_engine_up") == 1


def test_request_while_the_engine_is_away_is_refused_with_code(start_server: Callable[..., Server]) -> None:
    server = start_server()
    answers = []
    os.kill(server.children()["engine"], signal.SIGKILL)
    for _ in range(200):
        answers.append(server.generate(text_input="a", max_tokens=2))
        time.sleep(0.01)
    codes = {error_code(answer) for status, answer in answers if status != 200}
    assert codes == {"engine_unavailable"}
    server.wait_ready()
    assert server.generate_text("a", 5) == "bcdef"


def test_engine_frozen_is_replaced(start_server: Callable[..., Server]) -> None:
    server = start_server()
    streams = Streams(server, 2)
    frozen = server.children()["engine"]
    os.kill(frozen, signal.SIGSTOP)
    streams.join()
    assert streams.last_codes == {"engine_unavailable"}
    wait_for(lambda: server.children().get("engine", frozen) != frozen)
    server.wait_ready()
    assert server.generate_text("a", 5) == "bcdef"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_unary"])
def test_stub_killed_or_frozen_tritonserver_is_restarted(
    start_server: Callable[..., Server], number: signal.Signals, model: str
) -> None:
    server = start_server()
    before, stubs = server.children(), server.stubs()
    streams = Streams(server, 3)
    os.kill(stubs[model], number)
    streams.join()  # clients see their connection close
    wait_for(lambda: server.children().get("tritonserver", before["tritonserver"]) != before["tritonserver"])
    server.wait_ready()
    assert server.children()["engine"] == before["engine"]
    assert server.generate_text("a", 5) == "bcdef"
    regions = [e for e in leftovers(server.pid) if e.startswith("/dev/shm") and not e.endswith("_lock")]
    assert len(regions) == len(server.stubs())
    wait_for(lambda: server.metric("dspark_requests_running") == 0)


def test_stub_of_the_gate_killed_is_replaced_without_a_restart(start_server: Callable[..., Server]) -> None:
    server = start_server()
    before, gate = server.children(), server.stubs()["dspark_engine"]
    os.kill(gate, signal.SIGKILL)
    wait_for(lambda: server.stubs().get("dspark_engine", gate) != gate, timeout_s=40.0)
    server.wait_ready()
    assert server.generate("dspark_engine")[0] == 200
    assert server.children() == before
    # The next engine's death turns health red all the same.
    os.kill(before["engine"], signal.SIGKILL)
    assert 400 in read_until_ready_changes(server)
    assert server.generate_text("a", 5) == "bcdef"


def test_tritonserver_killed_is_restarted(start_server: Callable[..., Server]) -> None:
    server = start_server()
    before = server.children()
    os.kill(before["tritonserver"], signal.SIGKILL)
    wait_for(lambda: server.children().get("tritonserver", before["tritonserver"]) != before["tritonserver"])
    server.wait_ready()
    assert server.generate_text("a", 5) == "bcdef"


def test_sigterm_under_load_loses_no_stream(start_server: Callable[..., Server]) -> None:
    server = start_server()
    expected = server.generate_text("a", 700)
    streams = Streams(server, 6, max_tokens=700, num_draft_tokens=1)
    assert server.stop() == 0
    streams.join()
    assert streams.broken == []
    texts = {"".join(event["text_output"] for event in events) for events in streams.events}
    assert texts == {expected}
    assert all(events[-1]["finish_reason"] == "length" for events in streams.events)


def test_launcher_killed_everything_ends(start_server: Callable[..., Server]) -> None:
    server = start_server()
    streams = Streams(server, 2)
    os.kill(server.pid, signal.SIGKILL)
    streams.join()
    assert server.process is not None
    server.process.wait()
    # Its temporary directory and its lock files cannot be removed by anybody but the next launcher.
    wait_for(lambda: all(entry.startswith("/tmp/") or entry.endswith("_lock") for entry in leftovers(server.pid)))
    start_server().generate_text("a", 1)
    assert leftovers(server.pid) == []


def test_control_key_is_on_no_command_line_and_unlocks_the_control_api(start_server: Callable[..., Server]) -> None:
    server = start_server()
    (key_file,) = Path("/tmp").glob(f"{PREFIX}_{server.pid}_*/control_key")
    assert key_file.stat().st_mode & 0o077 == 0 or key_file.parent.stat().st_mode & 0o077 == 0
    key = key_file.read_text()
    pids = [server.pid, *server.children().values(), *server.stubs().values()]
    assert len(pids) > 8
    assert all(key not in command_line(pid) for pid in pids)
    path = "/v2/repository/index"
    assert server.post(path, b"")[0] == 403
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10.0)
    connection.request("POST", path, b"", {"dspark-control": key})
    assert connection.getresponse().status == 200
    connection.close()


def test_log_on_a_full_disk_changes_nothing(toy_engine_dir: Path) -> None:
    server = Server(toy_engine_dir, Path("/dev/full"), ["--speculation=fixed"]).start()
    assert server.generate_text("a", 5) == "bcdef"
    os.kill(server.children()["engine"], signal.SIGKILL)
    read_until_ready_changes(server)
    assert server.generate_text("a", 5) == "bcdef"
    assert server.stop() == 0
