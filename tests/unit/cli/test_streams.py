"""Output and log that cannot be written: the exit code still says what happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.engine_files import fill_engine_dir


def run(*arguments: str, **streams: object) -> subprocess.CompletedProcess[str]:
    # Buffered, as a user's Python is.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "trtllm_dspark.cli.main", *arguments]
    return subprocess.run(command, text=True, env=environment, **streams)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def engine(tmp_path: Path) -> str:
    fill_engine_dir(tmp_path / "engine")
    return str(tmp_path / "engine")


def test_output_on_a_full_disk_is_one_sentence_and_exit_code_4(engine: str) -> None:
    with open("/dev/full", "w") as full:
        done = run("inspect", "--engine_dir", engine, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 4
    assert done.stderr == "trtllm-dspark inspect: No space left on device\n"


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--speed",), 2)])
def test_log_on_a_full_disk_keeps_the_exit_code(engine: str, flags: tuple[str, ...], code: int) -> None:
    with open("/dev/full", "w") as full:
        done = run("inspect", "--engine_dir", engine, *flags, stdout=subprocess.PIPE, stderr=full)
    assert done.returncode == code


def test_log_on_a_full_disk_keeps_the_exit_code_of_an_error(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run("inspect", "--engine_dir", str(tmp_path / "none"), stderr=full)
    assert done.returncode == 3


def test_reader_that_leaves_is_quiet(engine: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = run("inspect", "--engine_dir", engine, stdout=closed, stderr=subprocess.PIPE)
    assert done.returncode == 4
    assert done.stderr == ""


def test_closed_streams_do_not_crash(engine: str) -> None:
    command = f"exec {sys.executable} -m trtllm_dspark.cli.main inspect --engine_dir {engine} >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0


def test_inspect_shows_the_rest_of_an_engine_whose_graph_is_none(engine: str) -> None:
    done = run("inspect", "--engine_dir", engine, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0
    assert "no ONNX graph; build the engine again" in done.stdout
