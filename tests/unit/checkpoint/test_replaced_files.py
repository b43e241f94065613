"""A file that is replaced or rewritten between its header and its values is an error, never a mixture of two models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.gguf_files import write_gguf
from helpers.tiny_models import write_drafter, write_target

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.checkpoint import Checkpoint, load_drafter, load_target
from trtllm_dspark.errors import CheckpointError

CHANGED = "was replaced or changed while the checkpoint was read; start again when nothing writes to it"


def put_in_place(path: Path, other: Path) -> None:
    """Put another file of the same size and time in the place of one, as a download or a link that moves does."""
    times = path.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert other.stat().st_size == times.st_size
    os.replace(other, path)


def rewrite(path: Path, other: Path) -> None:
    """Write other content of the same size into the file itself."""
    times = path.stat()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1_000_000))


def hugging_face(directory: Path, seed: int) -> tuple[Path, Path]:
    return directory, write_target(directory, seed=seed) / "model.safetensors"


def gguf(directory: Path, seed: int) -> tuple[Path, Path]:
    source = load_target(write_target(directory, seed=seed))
    path = write_gguf(directory / "m.gguf", source)
    return path, path


CHANGES = pytest.mark.parametrize("change", [put_in_place, rewrite])
FORMATS = pytest.mark.parametrize("write", [hugging_face, gguf])


def weights_entry(checkpoint: Checkpoint, path: Path) -> int:
    return [file.path for file in checkpoint.files].index(path)


@CHANGES
@FORMATS
def test_values_of_a_changed_file_are_refused(
    tmp_path: Path, write: Callable[[Path, int], tuple[Path, Path]], change: Callable[[Path, Path], None]
) -> None:
    (path, weights), (_, others) = write(tmp_path / "one", 0), write(tmp_path / "other", 1)
    target = load_target(path)
    assert target.arrays["norm.weight"].shape == (64,)
    change(weights, others)
    with pytest.raises(CheckpointError, match=CHANGED):
        target.arrays["norm.weight"]
    rows = target.arrays.entry("embed.weight").load_rows
    assert rows is not None
    with pytest.raises(CheckpointError, match=CHANGED):
        rows(0, 1)


@CHANGES
@FORMATS
def test_changed_file_is_not_hashed(
    tmp_path: Path, write: Callable[[Path, int], tuple[Path, Path]], change: Callable[[Path, Path], None]
) -> None:
    (path, weights), (_, others) = write(tmp_path / "one", 0), write(tmp_path / "other", 1)
    target = load_target(path)
    file = target.files[weights_entry(target, weights)]
    change(weights, others)
    with pytest.raises(CheckpointError, match=CHANGED):
        assert file.sha256
    assert load_target(path).files[weights_entry(target, weights)].sha256


def test_changed_drafter_is_refused(tmp_path: Path) -> None:
    target = load_target(write_target(tmp_path / "target"))
    drafter = load_drafter(write_drafter(tmp_path / "one"), target.config)
    put_in_place(
        tmp_path / "one" / "model.safetensors", write_drafter(tmp_path / "other", seed=5) / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=CHANGED):
        drafter.arrays["fc.weight"]


def test_build_from_a_file_that_changes_leaves_nothing(tmp_path: Path) -> None:
    weights = write_target(tmp_path / "one") / "model.safetensors"
    other = write_target(tmp_path / "other", seed=1) / "model.safetensors"
    config = BuildConfig(str(tmp_path / "one"), tmp_path / "engine", max_seq_len=64)

    def change(step: str, done: float) -> None:
        if step == "target" and done > 0 and other.exists():
            put_in_place(weights, other)

    with pytest.raises(CheckpointError, match=CHANGED):
        build_engine(config, progress=change)
    assert not (tmp_path / "engine").exists()
    build_engine(config)
