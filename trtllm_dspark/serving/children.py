"""Child processes that end with this one, and what /proc says about them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_TIE = Path(__file__).with_name("tie_to_parent.py")


def spawn(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a child in its own session that gets SIGTERM when this process ends, however it ends.

    Must be called from a thread that lives as long as the process (the kernel ties the child to that thread).
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_TIE), str(os.getpid()), *command],
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def children_of(pid: int) -> list[int]:
    """Return the pids of the direct children of a process, threads' children included."""
    found: list[int] = []
    for task in _entries(f"/proc/{pid}/task"):
        found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return found


def process_state(pid: int) -> str:
    """Return the kernel's one-letter state, or "" for a process that is gone ("Z" counts as gone)."""
    stat = _read(f"/proc/{pid}/stat")
    state = stat.rpartition(b")")[2].split(maxsplit=1)[0].decode() if stat else ""
    return "" if state in ("Z", "X") else state


def kill_tree(process: subprocess.Popen[bytes], *, orphans: Iterable[int] = ()) -> None:
    """SIGKILL a child and its children, and reap the child.

    Args:
        process: the child.
        orphans: pids that were its children before it ended, and may live on under another parent.
    """
    pids = [*orphans, *children_of(process.pid), process.pid]
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 5.0
    while any(process_state(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_stubs(mark: str, *, timeout_s: float = 5.0) -> None:
    """SIGKILL every Triton stub whose arguments carry `mark`, whoever its parent is by now, and wait for their end."""
    pids = [int(name) for name in _entries("/proc") if name.isdigit()]
    stubs = [pid for pid in pids if mark in (line := command_line(pid)) and "triton_python_backend_stub" in line]
    for pid in stubs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while any(process_state(pid) for pid in stubs) and time.monotonic() < deadline:
        time.sleep(0.02)


def command_line(pid: int) -> str:
    """Return a process's arguments separated by spaces, or "" when it is gone."""
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")


def _read(path: str) -> bytes:
    """Return a file of /proc, or nothing when its process is gone; unbuffered, since a launcher reads many a second."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
