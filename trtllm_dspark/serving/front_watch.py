"""The launcher's hold on the OpenAI-compatible front, where one was asked for."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import subprocess
import sys
import time

from trtllm_dspark.errors import DeviceError, UsageError
from trtllm_dspark.serving.children import kill_tree, spawn
from trtllm_dspark.serving.tritonserver import ServerAddress

logger = logging.getLogger(__name__)

_MAX_QUICK_ENDS = 5
_QUICK_S = 5.0


def check_front_packages() -> None:
    """Refuse to start without the packages the front needs.

    Raises:
        UsageError: naming what to install.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--openai_port needs {' and '.join(missing)}; install them with pip install '.[triton]' in a checkout"
        )


class FrontWatch:
    """One front process and its successors; does nothing without a port.

    Args:
        address: its host is Triton's.
        port: where it listens, or None for no front.
        socket_path: the engine's socket.
        drain_s: seconds its SIGTERM waits for open streams.
    """

    def __init__(self, address: ServerAddress, port: int | None, socket_path: str, *, drain_s: int) -> None:
        self._port = port
        self._host = address.http_target
        self._command = [
            sys.executable,
            "-m",
            "trtllm_dspark.serving.openai_front",
            f"--socket={socket_path}",
            f"--host={address.host}",
            f"--port={port}",
            f"--drain_timeout={drain_s}",
            f"--parent_pid={os.getpid()}",
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._quick_ends = 0

    def poll(self) -> None:
        """Start the front, or start it again.

        Raises:
            DeviceError: it ended at once again and again.
        """
        if self._port is None:
            return
        now = time.monotonic()
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._quick_ends = self._quick_ends + 1 if now - self._started < _QUICK_S else 0
            if self._quick_ends >= _MAX_QUICK_ENDS:
                raise DeviceError("the OpenAI front ends as soon as it starts; its messages are above")
            logger.warning("the OpenAI front ended with code %s; it is started again", self._process.returncode)
        self._started = now
        self._process = spawn(self._command)

    def is_ready(self) -> bool:
        """Return whether it accepts connections (True without a front)."""
        if self._port is None:
            return True
        try:
            socket.create_connection((self._host, self._port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def terminate(self) -> None:
        """Let open streams finish and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    @property
    def ended(self) -> bool:
        """Whether no process is left."""
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            kill_tree(self._process)
            self._process = None
