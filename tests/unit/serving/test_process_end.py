"""However the engine process ends, its traffic recorder is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtllm_dspark.engine_process import __main__ as process
from trtllm_dspark.errors import DeviceError, EngineError


class Recorder:
    """A recorder that knows whether it was closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    def listener(self, manifest: Any) -> None:
        return None

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("place", ["open_load_control", "open_session", "make_lane", "serve_lane", ""])
def test_recorder_is_closed_wherever_the_process_fails(
    toy_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(process, "_recorder", lambda args, metrics: recorder)
    monkeypatch.setattr(process, "serve_lane", lambda *args: None)
    if place:

        def fail(*args: Any, **options: Any) -> None:
            raise EngineError("planted failure") if place == "open_session" else DeviceError("planted failure")

        monkeypatch.setattr(process, place, fail)
    flags = [f"--engine_dir={toy_engine_dir}", f"--socket={tmp_path / 's'}", "--speculation=fixed", "--num_threads=1"]
    assert process.main(flags) == {"": 0, "open_session": 3}.get(place, 4)
    assert recorder.num_closed == 1
