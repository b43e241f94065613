"""Tables that a graph holds twice: the builder stores each initializer of its own, a tied head would double."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

_MIN_BYTES = 1 << 16
_SAMPLE_ROWS = 16
# A model is made deeper by copies of its layers, and projections begin as zeros: equal ones are the checkpoint's own.
_LAYER = re.compile(r"(^|[./])layers\.\d+\.")


def duplicated_weights(model: onnx.ModelProto, directory: Path) -> Iterator[str]:
    """Yield a problem for each pair of matrices with equal values, transposed ones included; reads the data files.

    Two matrices of decoder layers may be equal: what is looked for are tables and heads.
    """
    large = [
        tensor
        for tensor in model.graph.initializer
        if len(tensor.dims) == 2 and _num_bytes(tensor) >= _MIN_BYTES and tensor.external_data
    ]
    # Many matrices have the same shape: each is sampled once, and only equal samples are compared in full.
    begins: dict[tuple[object, ...], list[onnx.TensorProto]] = {}
    for tensor in large:
        values, shape = _values(tensor, directory), tuple(tensor.dims)
        straight = (tensor.data_type, shape, _digest(values[:_SAMPLE_ROWS]))
        turned = (tensor.data_type, shape[::-1], _digest(values[:, :_SAMPLE_ROWS].T))
        for other in begins.get(straight, []):
            if not _both_of_layers(other, tensor) and _equal(_values(other, directory), values):
                yield _problem(other, tensor)
        for other in begins.get(turned, []) if turned != straight else []:
            if not _both_of_layers(other, tensor) and _equal(_values(other, directory), values.T):
                yield _problem(other, tensor)
        begins.setdefault(straight, []).append(tensor)


def _both_of_layers(one: onnx.TensorProto, other: onnx.TensorProto) -> bool:
    return all(_LAYER.search(tensor.name) for tensor in (one, other))


def _problem(one: onnx.TensorProto, other: onnx.TensorProto) -> str:
    return (
        f"weights {one.name!r} and {other.name!r} hold the same values, TensorRT would store them twice; "
        "use one initializer for both"
    )


def _digest(values: NDArray[np.uint8]) -> bytes:
    return hashlib.sha1(values.tobytes(), usedforsecurity=False).digest()


def _num_bytes(tensor: onnx.TensorProto) -> int:
    return next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), 0)


def _values(tensor: onnx.TensorProto, directory: Path) -> NDArray[np.uint8]:
    """Map the bytes of a matrix as [rows, columns] elements of raw bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length, offset = int(entries["length"]), int(entries["offset"])
    raw = np.memmap(directory / entries["location"], np.uint8, "r", offset, (length,))
    rows, columns = tensor.dims
    size = length // (rows * columns)
    # Values of less than a byte stay packed.
    return raw.view(np.dtype(f"V{size}")).reshape(rows, columns) if size else raw.reshape(rows, -1)


def _equal(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> bool:
    return all(
        first[row : row + 1024].tobytes() == second[row : row + 1024].tobytes() for row in range(0, len(first), 1024)
    )
