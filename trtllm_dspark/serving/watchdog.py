"""End this process when the one that started it is gone: no orphan keeps an engine's memory."""

from __future__ import annotations

import os
import threading
import time

_POLL_S = 0.5


def exit_with_parent(parent_pid: int | None = None, *, exit_code: int = 4) -> None:
    """Poll the parent's pid from a daemon thread and leave at once, without cleanup, when it changes.

    Args:
        parent_pid: the parent the caller believes it has (closes the race with a parent that died before this
            call); the current parent when None.
        exit_code: what the process exits with.
    """
    expected = os.getppid() if parent_pid is None else parent_pid

    def poll() -> None:
        while os.getppid() == expected:
            time.sleep(_POLL_S)
        # Not sys.exit: other threads may hold locks that a normal exit waits for.
        os._exit(exit_code)

    threading.Thread(target=poll, name="parent-watchdog", daemon=True).start()
