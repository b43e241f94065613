"""Write and read shards of traffic records: whole or not at all, within a size, readable by one user."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.safetensors_io import read_file, write_file
from trtllm_dspark.errors import CheckpointError, UsageError
from trtllm_dspark.traffic.layout import INFO_NAME, KEY_NAME, TrafficInfo, TrafficRecord, check_same, read_info

_SHARD = re.compile(r"shard_(\d{8})\.jsonl")
_LOCK_NAME = ".lock"


def shard_numbers(directory: Path) -> list[int]:
    """Return the numbers of the complete shards, oldest first."""
    return sorted(int(match[1]) for path in directory.iterdir() if (match := _SHARD.fullmatch(path.name)))


def shard_paths(directory: Path, number: int) -> tuple[Path, Path]:
    """Return the two files of a shard."""
    stem = directory / f"shard_{number:08d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".jsonl")


def shard_bytes(directory: Path, number: int) -> int:
    """Return the size of a shard; 0 for one that is gone."""
    total = 0
    for path in shard_paths(directory, number):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


class ShardWriter:
    """Append shards to a directory; one writer at a time.

    Args:
        directory: made where needed.
        info: what the records share; a directory of other records is refused.
        max_bytes: of all shards together; the oldest go first.

    Raises:
        UsageError: the directory cannot be written, or another server writes it.
        EngineMismatch: it holds other records.
    """

    def __init__(self, directory: Path, info: TrafficInfo, *, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"cannot write to {directory} ({error.strerror}); choose another --collect_dir") from error
        try:
            self._prepare(info)
        except BaseException:
            os.close(self._lock)
            raise

    def _prepare(self, info: TrafficInfo) -> None:
        directory = self._directory
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another server collects into {directory}; choose another --collect_dir") from error
        if (directory / INFO_NAME).exists():
            check_same(directory, read_info(directory), info)
        elif any(path.name != _LOCK_NAME for path in directory.iterdir()):
            raise UsageError(f"{directory} is not empty and holds no traffic records; choose another --collect_dir")
        else:
            write_private(directory / INFO_NAME, info.to_json().encode())
        for path in directory.glob(".tmp_*"):  # of a writer that was killed
            path.unlink(missing_ok=True)
        numbers = shard_numbers(directory)
        for path in directory.glob("shard_*.safetensors"):
            if not path.with_suffix(".jsonl").exists():
                path.unlink(missing_ok=True)
        self._sizes = {number: shard_bytes(directory, number) for number in numbers}
        self._next = max(numbers, default=0) + 1

    @property
    def total_bytes(self) -> int:
        """Size of all shards."""
        return sum(self._sizes.values())

    def write(self, records: Sequence[TrafficRecord]) -> None:
        """Write one shard, after making room for it.

        Raises:
            OSError: the disk refuses; nothing of the shard is left.
        """
        size = sum(record.num_bytes for record in records)
        while self._sizes and self.total_bytes + size > self._max_bytes:
            self._delete(min(self._sizes))
        tensors, lines = self._directory / ".tmp_tensors", self._directory / ".tmp_lines"
        number = self._next
        try:
            write_private(tensors, b"")
            write_file(tensors, _tensors(records), bfloat16=frozenset({"features"}))
            _sync(tensors)
            write_private(lines, "".join(json.dumps(record.meta) + "\n" for record in records).encode())
            final_tensors, final_lines = shard_paths(self._directory, number)
            os.rename(tensors, final_tensors)
            os.rename(lines, final_lines)
        except BaseException:
            for path in (tensors, lines, *shard_paths(self._directory, number)):
                path.unlink(missing_ok=True)
            raise
        self._sizes[number] = shard_bytes(self._directory, number)
        self._next += 1
        while len(self._sizes) > 1 and self.total_bytes > self._max_bytes:
            self._delete(min(self._sizes))

    def close(self) -> None:
        """Let another writer in."""
        os.close(self._lock)

    def _delete(self, number: int) -> None:
        tensors, lines = shard_paths(self._directory, number)
        lines.unlink(missing_ok=True)
        tensors.unlink(missing_ok=True)
        del self._sizes[number]


def read_shard(directory: Path, number: int, info: TrafficInfo) -> Iterator[TrafficRecord]:
    """Yield the records of a shard; features as float32.

    Raises:
        UsageError: the shard is damaged; the message names it.
    """
    tensors_path, lines_path = shard_paths(directory, number)
    try:
        tensors = {name: tensor.read() for name, tensor in read_file(tensors_path).items()}
        lines = [json.loads(line) for line in lines_path.read_text(encoding="utf-8").splitlines()]
        token_offsets, round_offsets = tensors["token_offsets"], tensors["round_offsets"]
        rows = len(tensors["token_ids"]) - len(lines)
        for name, width in (("features", info.feature_size), ("top_ids", info.top_k), ("top_probs", info.top_k)):
            if tensors[name].shape != (rows, width):
                raise ValueError(f"{name} has shape {tensors[name].shape}, expected {(rows, width)}")
        if len(token_offsets) != len(lines) + 1 or token_offsets[-1] != len(tensors["token_ids"]):
            raise ValueError("its offsets do not fit its tokens")
        rounds = np.stack([tensors[name] for name in ("round_positions", "round_verified", "round_accepted")], axis=1)
        for index, meta in enumerate(lines):
            first, last = int(token_offsets[index]), int(token_offsets[index + 1])
            span = slice(first - index, last - index - 1)
            yield TrafficRecord(
                token_ids=tensors["token_ids"][first:last],
                start_position=int(tensors["start_positions"][index]),
                features=tensors["features"][span],
                top_ids=tensors["top_ids"][span],
                top_probs=tensors["top_probs"][span].astype(np.float16),
                rounds=rounds[int(round_offsets[index]) : int(round_offsets[index + 1])],
                meta=meta,
            )
    except (OSError, CheckpointError, ValueError, KeyError, IndexError) as error:
        raise UsageError(f"{tensors_path} is damaged ({error}); delete it with its .jsonl file") from error


def read_lines(directory: Path, number: int) -> list[dict[str, Any]]:
    """Return what a shard says about its requests.

    Raises:
        UsageError: the file is damaged.
    """
    path = shard_paths(directory, number)[1]
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not all(isinstance(line, dict) and {"num_output_tokens", "engine_hash"} <= set(line) for line in lines):
            raise ValueError("a line lacks a field")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged ({error}); delete it with its .safetensors file") from error
    return lines


def purge(directory: Path, info: TrafficInfo) -> int:
    """Delete everything a recorder wrote and return how many shards there were.

    Raises:
        UsageError: a server is writing there.
    """
    writer = ShardWriter(directory, info, max_bytes=1)
    try:
        numbers = shard_numbers(directory)
        for number in numbers:
            for path in reversed(shard_paths(directory, number)):
                path.unlink(missing_ok=True)
        for name in (KEY_NAME, INFO_NAME, _LOCK_NAME):
            (directory / name).unlink(missing_ok=True)
    finally:
        writer.close()
    with contextlib.suppress(OSError):
        directory.rmdir()  # holds something else
    return len(numbers)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user reads, and flush it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _tensors(records: Sequence[TrafficRecord]) -> dict[str, NDArray[Any]]:
    def offsets(lengths: list[int]) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    rounds = np.concatenate([record.rounds for record in records]).astype(np.int32)
    return {
        "token_ids": np.concatenate([record.token_ids for record in records]).astype(np.int32),
        "token_offsets": offsets([len(record.token_ids) for record in records]),
        "start_positions": np.array([record.start_position for record in records], np.int64),
        "features": np.concatenate([record.features for record in records]),
        "top_ids": np.concatenate([record.top_ids for record in records]).astype(np.int32),
        "top_probs": np.concatenate([record.top_probs for record in records]).astype(np.float16),
        "round_offsets": offsets([len(record.rounds) for record in records]),
        "round_positions": np.ascontiguousarray(rounds[:, 0]),
        "round_verified": np.ascontiguousarray(rounds[:, 1]),
        "round_accepted": np.ascontiguousarray(rounds[:, 2]),
    }
