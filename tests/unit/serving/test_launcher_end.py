"""The end of the launcher: one signal drains, a second one does not wait."""

from __future__ import annotations

import time
from typing import Any

from trtllm_dspark.serving.launcher import Launcher, ServeOptions
from trtllm_dspark.serving.tritonserver import ServerAddress


class Front:
    """A front whose requests never end."""

    ended = False
    calls: list[str]

    def __init__(self) -> None:
        self.calls = []

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")


def drain(num_signals: int, *, timeout_s: int) -> tuple[float, list[str]]:
    options = ServeOptions(ServerAddress("127.0.0.1", 0, 0, 0), drain_timeout_s=timeout_s)
    launcher = Launcher(options, lambda socket_path, engine_dir: [])
    for _ in range(num_signals):
        launcher._on_signal(15, None)
    front: Any = Front()
    started = time.monotonic()
    launcher._drain(front)
    return time.monotonic() - started, front.calls


def test_second_signal_before_the_drain_began_counts() -> None:
    seconds, calls = drain(2, timeout_s=30)
    assert seconds < 5.0
    assert calls == ["terminate", "kill"]


def test_one_signal_waits_for_requests_in_flight() -> None:
    # The launcher gives Triton and the front 10 s more than they give their requests.
    seconds, calls = drain(1, timeout_s=-9)
    assert seconds >= 1.0
    assert calls == ["terminate", "kill"]
