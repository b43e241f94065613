"""Files that several test processes need and one of them makes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time make `path`; the others wait, then find it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made_once(factory: pytest.TempPathFactory, name: str, write: Callable[[Path], object]) -> Path:
    """Return a folder of this run that the first worker to ask fills by `write`; nobody changes it later."""
    base = factory.getbasetemp()
    # Each worker's base is a folder in the run's.
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared" / name
    with locked(path):
        if not path.exists():
            unfinished = path.with_name(f"{name}.{os.getpid()}")
            unfinished.mkdir()
            write(unfinished)
            unfinished.rename(path)
    return path
