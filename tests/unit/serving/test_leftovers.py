"""What killed launchers leave behind goes; what belongs to a living one stays, whatever its pid seems to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_dspark.serving import leftovers

PID_OF_NOBODY = 2**22 + 1  # above every kernel's pid_max


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    made = tmp_path / "shm", tmp_path / "tmp"
    for directory in made:
        directory.mkdir()
    monkeypatch.setattr(leftovers, "shared_directories", lambda: made)
    return made


def leave(directories: tuple[Path, Path], prefix: str) -> None:
    (directories[0] / f"{prefix}region").write_text("x")
    (directories[1] / f"{prefix}work").mkdir()
    (directories[1] / f"{prefix}work" / "engine.sock").write_text("x")


def names(directories: tuple[Path, Path]) -> set[str]:
    return {path.name for directory in directories for path in directory.iterdir()}


def test_sweep_leaves_what_a_living_launcher_of_another_pid_namespace_has(directories: tuple[Path, Path]) -> None:
    prefix = f"trtllm_dspark_{PID_OF_NOBODY}_ab_"
    with leftovers.hold_lock(prefix):
        leave(directories, prefix)
        leftovers.remove_stale_leftovers()
        assert names(directories) == {f"{prefix}region", f"{prefix}work", f"{prefix}lock"}
    assert names(directories) == {f"{prefix}region", f"{prefix}work"}


def test_sweep_takes_what_a_killed_launcher_had_although_its_pid_is_in_use(directories: tuple[Path, Path]) -> None:
    prefix = f"trtllm_dspark_{os.getpid()}_cd_"
    script = (
        "import os, sys; from pathlib import Path; from trtllm_dspark.serving import leftovers\n"
        f"leftovers.shared_directories = lambda: (Path({str(directories[0])!r}), Path({str(directories[1])!r}))\n"
        f"with leftovers.hold_lock({prefix!r}): os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    leave(directories, prefix)
    other = directories[0] / "trtllm_dspark_notes"
    other.write_text("x")
    leftovers.remove_stale_leftovers()
    assert names(directories) == {other.name}


def test_hold_lock_is_not_inherited_by_children(directories: tuple[Path, Path]) -> None:
    prefix = f"trtllm_dspark_{os.getpid()}_ef_"
    with leftovers.hold_lock(prefix):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        (directories[0] / f"{prefix}lock").touch()
        leftovers.remove_stale_leftovers()
        assert names(directories) == set()
    finally:
        child.kill()
        child.wait()
