"""The GGUF container: metadata, tensor directory, tensor bytes (versions 2 and 3, little-endian)."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.checkpoint._gguf_blocks import BLOCK_FORMATS, dequantise
from trtllm_dspark.checkpoint.arrays import Array, LazyArray
from trtllm_dspark.checkpoint.file_stamp import FileStamp
from trtllm_dspark.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Header of a GGUF file; tensor values are read by the entries of `tensors`."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, LazyArray]


class _Cursor:
    """Reads little-endian values one after another from the header."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.offset = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._buffer, self.offset)[0]
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.offset + length
        if end > len(self._buffer):
            raise struct.error("string runs past the end")
        text = self._buffer[self.offset : end].decode("utf-8")
        self.offset = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if count > len(self._buffer):
            raise struct.error("array runs past the end")
        if item_kind in (_STRING, _ARRAY):
            return [self.value(item_kind) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[item_kind]}", self._buffer, self.offset)
        self.offset += struct.calcsize(f"<{count}{_SCALARS[item_kind]}")
        return list(values)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        CheckpointError: the file is not GGUF, is damaged, or stores a tensor in a type that is not supported.
    """
    with path.open("rb") as stream:
        stamp = FileStamp.of(path, stream.fileno())
        magic = stream.read(8)
        if len(magic) < 8 or magic[:4] != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it does not start with the letters GGUF")
        version = struct.unpack("<I", magic[4:])[0]
        if version not in (2, 3):
            raise CheckpointError(f"{path} is GGUF version {version}, expected little-endian 2 or 3; convert it again")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            try:
                return _read_header(stamp, buffer)
            except (struct.error, KeyError, UnicodeDecodeError, MemoryError, RecursionError) as error:
                raise CheckpointError(f"{path} is damaged: its header is unreadable ({error}); get it again") from error


def _read_header(stamp: FileStamp, buffer: mmap.mmap) -> GgufFile:
    path = stamp.path
    cursor = _Cursor(buffer)
    cursor.offset = 8
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    directory = []
    for _ in range(num_tensors):
        name = cursor.string()
        # ggml lists the fastest dimension first.
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        directory.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a positive integer")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, LazyArray] = {}
    for name, shape, kind, offset in directory:
        if name in tensors:
            raise CheckpointError(f"{path} lists tensor {name} twice")
        tensors[name] = _tensor(stamp, name, shape, kind, data_start + offset)
    return GgufFile(path, metadata, tensors)


def _tensor(stamp: FileStamp, name: str, shape: tuple[int, ...], kind: int, offset: int) -> LazyArray:
    path = stamp.path
    block_format = BLOCK_FORMATS.get(kind)
    if block_format is None:
        known = ", ".join(sorted(entry.name for entry in BLOCK_FORMATS.values()))
        raise CheckpointError(f"{path}: tensor {name} has ggml type {kind}, which is not supported; use one of {known}")
    if not shape or shape[-1] % block_format.block_size:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} does not split into {block_format.name} blocks"
        )
    num_bytes = prod(shape) // block_format.block_size * block_format.block_bytes
    if offset + num_bytes > stamp.size:
        raise CheckpointError(f"{path} is cut short: tensor {name} runs past its end; get the file again")

    def read(start: int, size: int, wanted: tuple[int, ...]) -> Array:
        with stamp.open() as stream:
            stream.seek(offset + start)
            raw = np.fromfile(stream, np.uint8, size)
            if raw.size != size:
                raise CheckpointError(f"{path} became shorter while it was read: tensor {name} is incomplete")
        return dequantise(block_format, raw, wanted)

    def read_rows(begin: int, end: int) -> Array:
        # A block never reaches beyond its row.
        row_bytes = prod(shape[1:]) // block_format.block_size * block_format.block_bytes
        return read(begin * row_bytes, (end - begin) * row_bytes, (end - begin, *shape[1:]))

    return LazyArray(name, shape, lambda: read(0, num_bytes, shape), read_rows if len(shape) > 1 else None)
