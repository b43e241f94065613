"""The safetensors container: one file, or the sharded set an index names; and its writer."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trtllm_dspark.checkpoint.arrays import Array, LazyArray
from trtllm_dspark.checkpoint.file_stamp import FileStamp
from trtllm_dspark.errors import CheckpointError

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "BOOL": np.dtype("?"),
}
_MAX_HEADER_BYTES = 100 << 20
_WIDENED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file; `read` returns the stored values, floats widened to float32."""

    stamp: FileStamp
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def path(self) -> Path:
        """The file it is in."""
        return self.stamp.path

    def read(self) -> Array:
        """Read the values: float32 for F32, F16 and BF16, otherwise the stored type.

        Raises:
            CheckpointError: the file is not the one whose header was read.
        """
        return self._elements(0, self.num_bytes // _DTYPES[self.dtype].itemsize).reshape(self.shape)

    def read_rows(self, begin: int, end: int) -> Array:
        """Read rows `begin` to `end` of the first dimension, as `read` does all of them."""
        width = prod(self.shape[1:])
        return self._elements(begin * width, end * width).reshape(end - begin, *self.shape[1:])

    def _elements(self, begin: int, end: int) -> Array:
        stored = _DTYPES[self.dtype]
        with self.stamp.open() as stream:
            stream.seek(self.offset + begin * stored.itemsize)
            if self.dtype not in ("F16", "BF16"):
                return self._next(stream, end - begin)
            # Widened in pieces: a table of narrow numbers is never in memory beside its float32 values.
            values = np.empty(end - begin, np.float32)
            for at in range(0, values.size, _WIDENED_AT_ONCE):
                piece = values[at : at + _WIDENED_AT_ONCE]
                raw = self._next(stream, piece.size)
                if self.dtype == "BF16":
                    np.left_shift(raw, 16, out=piece.view(np.uint32), dtype=np.uint32)
                else:
                    piece[:] = raw
        return values

    def _next(self, stream: BinaryIO, count: int) -> Array:
        raw = np.fromfile(stream, _DTYPES[self.dtype], count)
        if raw.size != count:
            raise CheckpointError(f"{self.path} became shorter while it was read: tensor {self.name} is incomplete")
        return raw

    def lazy(self) -> LazyArray:
        """Return the tensor as a lazily read float32 array.

        Raises:
            CheckpointError: the stored type is not a plain floating-point type.
        """
        if self.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(
                f"tensor {self.name} in {self.path} has dtype {self.dtype}, expected F32, F16 or BF16; "
                "quantised checkpoints are not read, pass the original one"
            )
        return LazyArray(self.name, self.shape, self.read, self.read_rows if self.shape else None)


def read_directory(directory: Path) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Return the tensors of a model directory and the files they are in.

    Reads `model.safetensors`, or the shards `model.safetensors.index.json` names.

    Raises:
        CheckpointError: there is no safetensors file, a shard is missing, or a tensor is not where the index says.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return read_file(single), (single,)
    if not index.is_file():
        others = [path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".npz")]
        found = f"found {', '.join(sorted(others))}, which is not read" if others else "found no weights"
        raise CheckpointError(f"{directory} has no model.safetensors and no model.safetensors.index.json; {found}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files; the checkpoint is incomplete")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not (directory / shard).is_file():
            raise CheckpointError(f"{index} names shard {shard}, which is not in {directory}; download it")
        shards[shard] = read_file(directory / shard)
    tensors: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(f"{index} places tensor {name} in {shard}, which does not hold it")
        tensors[name] = shards[shard][name]
    for shard, held in shards.items():
        for name in held:
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{directory / shard} holds tensor {name}, which the index does not place there")
    return tensors, (index, *(directory / shard for shard in shards))


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file.

    Raises:
        CheckpointError: the file is damaged, or a tensor has a type that is not supported.
    """
    with path.open("rb") as stream:
        stamp = FileStamp.of(path, stream.fileno())
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(stamp.size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is damaged: it has no safetensors header; get it again")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: its safetensors header is not JSON; get it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its safetensors header is not an object; get it again")
    start = 8 + length
    return {name: _stored(stamp, name, entry, start) for name, entry in header.items() if name != "__metadata__"}


def write_file(path: Path, tensors: Mapping[str, Array], *, bfloat16: frozenset[str] = frozenset()) -> None:
    """Write a safetensors file.

    Args:
        path: file to create or replace.
        tensors: name -> values in a type the reader knows; written in name order, so equal input gives equal bytes.
        bfloat16: names whose values are given as uint16 bit patterns of bfloat16 numbers.

    Raises:
        CheckpointError: a tensor has a type the format does not know.
    """
    names = {dtype: name for name, dtype in _DTYPES.items() if name != "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        values = tensors[name]
        dtype = "BF16" if name in bfloat16 else names.get(values.dtype)
        if dtype is None:
            raise CheckpointError(f"tensor {name} of dtype {values.dtype} cannot be written to {path}")
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            stream.write(np.ascontiguousarray(tensors[name]).data)


def _stored(stamp: FileStamp, name: str, entry: Any, start: int) -> StoredTensor:
    path = stamp.path
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(dim) for dim in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: the header entry of tensor {name} cannot be read") from error
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"tensor {name} in {path} has dtype {dtype}, expected one of {', '.join(_DTYPES)}; "
            "quantised checkpoints are not read, pass the original one"
        )
    num_bytes = prod(shape) * _DTYPES[dtype].itemsize
    if begin < 0 or end - begin != num_bytes or min(shape, default=0) < 0:
        raise CheckpointError(f"{path} is damaged: tensor {name} has {end - begin} bytes, its shape needs {num_bytes}")
    if start + end > stamp.size:
        raise CheckpointError(f"{path} is cut short: tensor {name} runs past its end; get the file again")
    return StoredTensor(stamp, name, dtype, shape, start + begin, num_bytes)


def read_text(path: Path) -> str:
    """Return the content of a text file of a model directory.

    Raises:
        CheckpointError: it is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); get it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); correct it or get it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: the file is missing or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}; it is not a model directory") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); correct it or get it again") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); correct it or get it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
