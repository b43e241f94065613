"""The launcher's hold on the engine process: start, watch, restart with back-off."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from trtllm_dspark.errors import DeviceError
from trtllm_dspark.serving.children import kill_tree, spawn
from trtllm_dspark.serving.client import EngineClient
from trtllm_dspark.serving.framing import Message

logger = logging.getLogger(__name__)

BACKOFF_S = (0.1, 0.5, 2.0, 5.0, 10.0)
MAX_FAILED_STARTS = 5
_STATUS_PERIOD_S = 0.5
_SILENT_S = 6.0
_UNCONNECTED_S = 1.0


class EngineWatch:
    """One engine process and its successors.

    Args:
        command: engine directory -> argv of the engine process; "" stands for the one the user named, with the
            candidate the user named for it.
        socket_path: the socket it listens on.
        hang_timeout_s: a round that takes longer counts as a hang and the process is replaced.
        start_timeout_s: a process that loads for longer is replaced.

    Attributes:
        settled: set by the owner; False asks for the status more often, while stubs reconnect.
        restarts: processes started after the first.
    """

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        socket_path: str,
        *,
        hang_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._command = command
        self._engine_dir = ""
        self._hang_timeout_s = hang_timeout_s
        self._client = EngineClient(socket_path, name="launcher", role="launcher", on_reply=self._receive)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._status_at = 0.0
        self._asked_at = 0.0
        self._started_at = 0.0
        self._failed_starts = 0
        self._was_ready = False
        self._restart_at: float | None = None
        self._lost_at: float | None = None
        self._start_timeout_s = start_timeout_s
        self.settled = True
        self.restarts = 0

    def start(self) -> None:
        """Start the process; `poll` tells when it is ready."""
        self._launch()
        self._client.start()

    @property
    def ready(self) -> bool:
        """Whether the current process answers."""
        process = self._process
        return process is not None and self._client.connected and self._client.engine.get("pid") == process.pid

    @property
    def pid(self) -> int:
        """Pid of the current process, 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process when it ended before it was ever ready."""
        return None if self._process is None else self._process.poll()

    def stubs(self) -> tuple[list[dict[str, Any]], float]:
        """Return the connected stubs of the last status and that status's age in seconds."""
        with self._lock:
            if self._status.get("pid") != self.pid:
                return [], float("inf")
            clients = [c for c in self._status.get("clients", []) if c.get("role") == "stub"]
            return clients, time.monotonic() - self._status_at

    def poll(self) -> None:
        """Act on what happened since the last call: restart a dead process, kill a hung one.

        Raises:
            DeviceError: it ended too often without becoming ready.
        """
        now = time.monotonic()
        process = self._process
        if process is not None and process.poll() is not None:
            self._on_exit(process.returncode, now)
        elif process is not None and self.ready:
            if not self._was_ready:
                self._was_ready, self._failed_starts = True, 0
                self._status_at = self._asked_at = now
            self._lost_at = None
            self._watch_progress(process, now)
        elif process is not None:
            self._watch_unconnected(process, now)
        if self._process is None and self._restart_at is not None and now >= self._restart_at:
            self._restart_at = None
            self.restarts += 1
            self._launch()

    def stop(self, *, timeout_s: float) -> None:
        """End the process: gently first, then by force."""
        self._client.close()
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_tree(process)

    def _launch(self) -> None:
        self._was_ready = False
        self._started_at = time.monotonic()
        with self._lock:
            # What the process before said of itself would end this one too.
            self._status, self._status_at = {}, 0.0
        self._process = spawn(list(self._command(self._engine_dir)))

    def _on_exit(self, code: int, now: float) -> None:
        self._failed_starts = 0 if self._was_ready else self._failed_starts + 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise DeviceError(
                f"the engine process ended {self._failed_starts} times in a row before it was ready (last exit code "
                f"{code}); its messages are above"
            )
        delay = BACKOFF_S[min(self._failed_starts, len(BACKOFF_S) - 1)]
        logger.warning("the engine process ended with code %s; it is started again in %.1f s", code, delay)
        self._process = None
        self._restart_at = now + delay

    def _watch_unconnected(self, process: subprocess.Popen[bytes], now: float) -> None:
        """Replace a process that lives but does not answer: it froze, or it never finishes loading."""
        if self._was_ready:
            self._lost_at = now if self._lost_at is None else self._lost_at
            since, patience = self._lost_at, _UNCONNECTED_S
        else:
            since, patience = self._started_at, self._start_timeout_s
        if now - since > patience:
            logger.warning("the engine process does not answer; it is replaced")
            kill_tree(process)

    def _watch_progress(self, process: subprocess.Popen[bytes], now: float) -> None:
        with self._lock:
            # A late word of the process before says nothing of this one.
            mine = self._status.get("pid") == process.pid
            progress_age = float(self._status.get("progress_age_s", 0.0)) if mine else 0.0
            silent = now - self._status_at
        if progress_age > self._hang_timeout_s or silent > _SILENT_S:
            logger.warning("the engine process does not make progress; it is replaced")
            kill_tree(process)
            return
        if now - self._asked_at >= (_STATUS_PERIOD_S if self.settled else 0.0):
            self._asked_at = now
            self._client.post({"type": "status"})

    def _receive(self, message: Message) -> None:
        if message.get("type") == "status":
            with self._lock:
                self._status = message
                # What serves now serves after a restart too; a candidate that ended the process is not tried again.
                self._engine_dir = str(message.get("engine_dir", "")) or self._engine_dir
                self._status_at = time.monotonic()
