"""A directory appears whole or not at all, whatever happens to its writer."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.engine_files import WEIGHTS, fill_engine_dir

from trtllm_dspark.engine_dir import open_engine_dir, stage_directory, staging
from trtllm_dspark.errors import DeviceError, UsageError

NOBODY = 65534


def publish(destination: Path, payload: bytes, *, overwrite: bool = False) -> None:
    with stage_directory(destination, overwrite=overwrite) as staged:
        fill_engine_dir(staged.path, payload)
        staged.publish()


def test_stage_published_directory_is_complete_and_alone(tmp_path: Path) -> None:
    publish(tmp_path / "engine", b"one")
    open_engine_dir(tmp_path / "engine")
    assert os.listdir(tmp_path) == ["engine"]


def test_stage_makes_missing_parents_and_accepts_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    publish(tmp_path / "a" / "b", b"one")
    publish(tmp_path / "c" / "d", b"one")
    open_engine_dir(tmp_path / "a" / "b")
    open_engine_dir(tmp_path / "c" / "d")


def test_stage_unpublished_directory_is_removed(tmp_path: Path) -> None:
    with stage_directory(tmp_path / "engine", overwrite=False) as staged:
        fill_engine_dir(staged.path)
    assert os.listdir(tmp_path) == []


def test_stage_existing_engine_needs_overwrite_and_is_replaced_whole(tmp_path: Path) -> None:
    publish(tmp_path / "engine", b"one")
    (tmp_path / "engine" / "cost_table.json").write_text("{}")
    with pytest.raises(UsageError, match="add --overwrite"):
        publish(tmp_path / "engine", b"two")
    publish(tmp_path / "engine", b"two", overwrite=True)
    assert (tmp_path / "engine" / WEIGHTS).read_bytes() == b"two"
    assert not (tmp_path / "engine" / "cost_table.json").exists()
    assert os.listdir(tmp_path) == ["engine"]


def without_rename_exchange(monkeypatch: pytest.MonkeyPatch, code: int = errno.EINVAL) -> None:
    class Library:
        @staticmethod
        def renameat2(*_: object) -> int:
            return -1

    monkeypatch.setattr(staging.ctypes, "CDLL", lambda *_, **__: Library)
    monkeypatch.setattr(staging.ctypes, "get_errno", lambda: code)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_stage_without_rename_exchange_replaces_in_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    without_rename_exchange(monkeypatch, code)
    publish(tmp_path / "engine", b"one")
    publish(tmp_path / "engine", b"two", overwrite=True)
    assert (tmp_path / "engine" / WEIGHTS).read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["engine"]


def test_stage_killed_between_two_renames_brings_the_old_engine_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_rename_exchange(monkeypatch)
    fill_engine_dir(tmp_path / ".engine.replaced", b"one")
    # Before the build, not at its end.
    with pytest.raises(UsageError, match="add --overwrite"):
        stage_directory(tmp_path / "engine", overwrite=False).__enter__()
    assert os.listdir(tmp_path) == ["engine"]
    assert (tmp_path / "engine" / WEIGHTS).read_bytes() == b"one"
    assert "engine was brought back" in caplog.text
    publish(tmp_path / "engine", b"two", overwrite=True)
    assert (tmp_path / "engine" / WEIGHTS).read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["engine"]


@pytest.mark.parametrize("whole", [True, False])
def test_stage_killed_behind_both_renames_is_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    without_rename_exchange(monkeypatch)
    publish(tmp_path / "engine", b"one")
    fill_engine_dir(tmp_path / ".engine.replaced", b"old")
    if not whole:
        (tmp_path / ".engine.replaced" / WEIGHTS).unlink()
    publish(tmp_path / "engine", b"two", overwrite=True)
    assert (tmp_path / "engine" / WEIGHTS).read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["engine"]


def test_stage_never_brings_back_half_an_engine(tmp_path: Path) -> None:
    fill_engine_dir(tmp_path / ".engine.replaced", b"old")
    (tmp_path / ".engine.replaced" / WEIGHTS).unlink()
    publish(tmp_path / "engine", b"two")
    assert (tmp_path / "engine" / WEIGHTS).read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["engine"]


def test_stage_leaves_a_replacement_that_another_build_is_finishing(tmp_path: Path) -> None:
    fill_engine_dir(tmp_path / ".engine.replaced", b"old")
    lock = os.open(tmp_path / ".engine.replaced", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another build is writing"):
            publish(tmp_path / "engine", b"two")
    finally:
        os.close(lock)
    assert os.listdir(tmp_path) == [".engine.replaced"]


@pytest.fixture
def user_path() -> Iterator[Path]:
    """Return an empty folder of a user whom write protection stops, which it does not stop root from writing."""
    with tempfile.TemporaryDirectory() as name:
        root = os.geteuid() == 0
        if root:
            os.chown(name, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            if not os.access(name, os.W_OK, effective_ids=True):
                pytest.skip("needs a folder for temporary files that every user reaches")
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)


def protect(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        path.chmod(path.stat().st_mode & ~0o222)


def with_folder(engine: Path) -> None:
    """Add what a stripped plan leaves: a folder in the engine."""
    (engine / "graphs").mkdir()
    (engine / "graphs" / "target.onnx").write_bytes(b"graph")


@pytest.mark.parametrize("exchange", [True, False])
def test_stage_write_protected_engine_is_replaced_and_gone(
    user_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        without_rename_exchange(monkeypatch)
    publish(user_path / "engine", b"one")
    with_folder(user_path / "engine")
    protect(user_path / "engine")
    publish(user_path / "engine", b"two", overwrite=True)
    assert (user_path / "engine" / WEIGHTS).read_bytes() == b"two"
    assert os.listdir(user_path) == ["engine"]


def test_stage_write_protected_leftover_stops_no_build(user_path: Path) -> None:
    fill_engine_dir(user_path / ".engine.building")
    with_folder(user_path / ".engine.building")
    protect(user_path / ".engine.building")
    publish(user_path / "engine", b"two")
    open_engine_dir(user_path / "engine")
    assert os.listdir(user_path) == ["engine"]


def test_stage_what_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(staging.shutil, "rmtree", refuse)
    monkeypatch.setattr(staging, "_fsync", fail)
    path = tmp_path / ".engine.building"
    with pytest.raises(DeviceError, match=rf"check the disk or choose another --output_dir, remove {path} by hand"):
        publish(tmp_path / "engine", b"one")
    assert f"{path} could not be removed" in caplog.text


def test_stage_never_follows_a_link_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o500)
    with stage_directory(tmp_path / "engine", overwrite=False) as staged:
        (staged.path / "link").symlink_to(tmp_path / "home")
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o500


def test_stage_mount_point_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == volume)
    with pytest.raises(UsageError, match=rf"{volume} is a mount point; choose a directory in it, {volume}/engine"):
        publish(volume, b"one")
    assert os.listdir(tmp_path) == ["volume"]
    publish(volume / "engine", b"one")
    fill_engine_dir(volume)
    with pytest.raises(UsageError, match="is a mount point"):
        publish(volume, b"one", overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_stage_foreign_directory_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    with pytest.raises(UsageError, match="holds other files"):
        publish(tmp_path / "home", b"one", overwrite=overwrite)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"


def test_stage_file_or_link_as_destination_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(UsageError, match="is not a directory"):
            publish(tmp_path / name, b"one", overwrite=True)


def test_stage_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot write beside"):
        publish(tmp_path / "file" / "engine", b"one")


def test_stage_second_writer_is_refused_and_first_is_unharmed(tmp_path: Path) -> None:
    with stage_directory(tmp_path / "engine", overwrite=False) as staged:
        fill_engine_dir(staged.path)
        with pytest.raises(UsageError, match="another build is writing"):
            publish(tmp_path / "engine", b"two")
        staged.publish()
    assert (tmp_path / "engine" / WEIGHTS).read_bytes() == b"weights"


def test_stage_destination_that_appeared_meanwhile_is_kept(tmp_path: Path) -> None:
    with stage_directory(tmp_path / "e", overwrite=False) as staged:
        fill_engine_dir(staged.path, b"late")
        fill_engine_dir(tmp_path / "e", b"early")
        with pytest.raises(UsageError, match="add --overwrite"):
            staged.publish()
    assert (tmp_path / "e" / WEIGHTS).read_bytes() == b"early"
    assert os.listdir(tmp_path) == ["e"]


def test_stage_many_writers_leave_one_whole_engine(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def write(number: int) -> None:
        try:
            publish(tmp_path / "engine", b"%d" % number * 1000, overwrite=True)
            outcomes.append("ok")
        except UsageError:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "ok" in outcomes
    open_engine_dir(tmp_path / "engine")
    assert os.listdir(tmp_path) == ["engine"]


WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from helpers.engine_files import fill_engine_dir
from trtllm_dspark.engine_dir import stage_directory
with stage_directory(Path({destination!r}), overwrite=True) as staged:
    fill_engine_dir(staged.path)
    print("half way", flush=True)
    time.sleep(60)
"""


def test_stage_killed_writer_leaves_old_engine_and_next_build_cleans_up(tmp_path: Path) -> None:
    publish(tmp_path / "engine", b"one")
    code = WRITER.format(tests=str(Path(__file__).parents[2]), destination=str(tmp_path / "engine"))
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half way\n"
        writer.send_signal(signal.SIGKILL)
    assert sorted(os.listdir(tmp_path)) == [".engine.building", "engine"]
    assert (tmp_path / "engine" / WEIGHTS).read_bytes() == b"one"
    publish(tmp_path / "engine", b"two", overwrite=True)
    assert (tmp_path / "engine" / WEIGHTS).read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["engine"]


def test_stage_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(DeviceError, match="free space or choose another --output_dir, nothing was left behind"):
            publish(tmp_path / "engine", b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
