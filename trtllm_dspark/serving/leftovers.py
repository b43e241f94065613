"""What launchers keep in directories that others share, and the removal of what killed ones left there.

Whether a launcher lives is asked of the kernel by a lock that it holds, not by its pid: /tmp and /dev/shm may be shared
with containers whose processes have numbers of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "trtllm_dspark"
_LOCK_SUFFIX = "lock"


def shared_directories() -> tuple[Path, Path]:
    """Return where launchers leave things when they are killed."""
    return Path("/dev/shm"), Path(tempfile.gettempdir())


@contextlib.contextmanager
def hold_lock(prefix: str) -> Iterator[None]:
    """Hold a lock file in every shared directory, so that nobody takes what begins with `prefix` for a leftover.

    Args:
        prefix: of everything this launcher makes there; ends in "_".
    """
    with contextlib.ExitStack() as stack:
        for directory in shared_directories():
            path = directory / f"{prefix}{_LOCK_SUFFIX}"
            stack.callback(os.close, _lock(path))
            stack.callback(path.unlink, missing_ok=True)
        yield


def remove_shared_memory(prefix: str) -> None:
    """Delete what killed stubs left in /dev/shm."""
    _remove(Path("/dev/shm"), prefix)


def remove_stale_leftovers() -> None:
    """Delete shared memory and temporary directories of launchers that were killed."""
    for directory in shared_directories():
        for lock in directory.glob(f"{PREFIX}_*_{_LOCK_SUFFIX}"):
            with contextlib.suppress(OSError), lock.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its launcher lives
                _remove(directory, lock.name.removesuffix(_LOCK_SUFFIX))
                lock.unlink()


def _remove(directory: Path, prefix: str) -> None:
    for path in directory.glob(f"{prefix}*"):
        if path.name.endswith(f"_{_LOCK_SUFFIX}"):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _lock(path: Path) -> int:
    """Create and lock a file; another launcher's sweep may take it between the two, so look again."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)
