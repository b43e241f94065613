"""An engine process for the length of a test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trtllm_dspark.serving.client import EngineClient


@contextmanager
def running_engine(command: Sequence[str], socket: Path, *, role: str) -> Iterator[EngineClient]:
    """Start `command`, which serves an engine on `socket`; give a connected client, and end both cleanly."""
    process = subprocess.Popen(command)
    client = EngineClient(str(socket), name="test", role=role)
    client.start()
    try:
        assert client.wait_connected(120.0), process.poll()
        yield client
    finally:
        client.close()
        process.terminate()
        assert process.wait(60.0) == 0
