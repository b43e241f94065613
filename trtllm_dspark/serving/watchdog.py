"""End this process when the one that started it is gone: no orphan keeps an engine's memory."""

from __future__ import annotations

import os
import signal
import threading
import time

_POLL_S = 0.5


def exit_with_parent(parent_pid: int | None = None, *, exit_code: int = 4, stall_limit_s: float | None = None) -> None:
    """Poll the parent's pid from a daemon thread and leave at once, without cleanup, when it changes.

    Args:
        parent_pid: the parent the caller believes it has (closes the race with a parent that died before this
            call); the current parent when None.
        exit_code: what the process exits with.
        stall_limit_s: also end (by SIGALRM, which must not be used otherwise) when this thread does not get to run for
            so long: a native call that blocks for ever with the interpreter's lock held stops every Python thread,
            this one too.
    """
    expected = os.getppid() if parent_pid is None else parent_pid

    def poll() -> None:
        while os.getppid() == expected:
            if stall_limit_s is not None:
                signal.setitimer(signal.ITIMER_REAL, stall_limit_s)
            time.sleep(_POLL_S)
        # Not sys.exit: other threads may hold locks that a normal exit waits for.
        os._exit(exit_code)

    threading.Thread(target=poll, name="parent-watchdog", daemon=True).start()
