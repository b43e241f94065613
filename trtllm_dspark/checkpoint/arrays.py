"""Named tensors that are read from disk only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trtllm_dspark.errors import CheckpointError

Array: TypeAlias = npt.NDArray[Any]
_COMPARED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class LazyArray:
    """One tensor of a checkpoint: its shape is known, its values are read by `load`."""

    source_name: str
    """Name inside the checkpoint file, for messages."""
    shape: tuple[int, ...]
    load: Callable[[], Array]
    load_rows: Callable[[int, int], Array] | None = None
    """Reads rows `begin` to `end` alone; None where only the whole can be read."""

    def map(self, function: Callable[[Array], Array], shape: tuple[int, ...] | None = None) -> LazyArray:
        """Return the tensor whose values are `function` of this one's; `shape` is the new shape if it changes."""
        load = self.load
        return LazyArray(self.source_name, self.shape if shape is None else shape, lambda: function(load()))


def equal_values(one: LazyArray, other: LazyArray) -> bool:
    """Tell whether two tensors hold the same values; reads them piece by piece, up to the first difference."""
    if one.shape != other.shape:
        return False
    if not one.shape:
        return np.array_equal(one.load(), other.load())
    step = max(1, _COMPARED_AT_ONCE // max(1, prod(one.shape[1:])))
    first, second = _row_reader(one), _row_reader(other)
    return all(
        np.array_equal(first(begin, end), second(begin, end))
        for begin in range(0, one.shape[0], step)
        for end in (min(begin + step, one.shape[0]),)
    )


def _row_reader(entry: LazyArray) -> Callable[[int, int], Array]:
    if entry.load_rows is not None:
        return entry.load_rows
    values = entry.load()
    return lambda begin, end: values[begin:end]


class LazyArrays(Mapping[str, Array]):
    """Canonical name -> values; every access reads and converts anew, nothing is cached.

    Floating-point tensors come as C-contiguous float32, vocabulary maps as int64.
    """

    def __init__(self, entries: Mapping[str, LazyArray]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Array:
        """Read one tensor.

        Raises:
            KeyError: the checkpoint has no tensor of that name.
            CheckpointError: the file does not hold what its header promised, or holds NaN or infinity.
        """
        entry = self._entries[name]
        values = np.ascontiguousarray(entry.load())
        if values.shape != entry.shape:
            raise CheckpointError(
                f"tensor {entry.source_name} was read with shape {list(values.shape)} instead of {list(entry.shape)}"
            )
        # A sum is finite only if every term is; it needs no temporary of the tensor's size.
        if values.dtype == np.float32 and not np.isfinite(values.sum(dtype=np.float64)):
            raise CheckpointError(
                f"tensor {entry.source_name} holds NaN or infinity; the checkpoint is damaged or not fully trained"
            )
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        # Mapping's own test would read the tensor.
        return name in self._entries

    def entry(self, name: str) -> LazyArray:
        """Return one tensor unread."""
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor without reading its values."""
        return self._entries[name].shape

    def source_name(self, name: str) -> str:
        """Return the name the tensor has in the checkpoint file."""
        return self._entries[name].source_name

    def without(self, *names: str) -> LazyArrays:
        """Return the same tensors less those named."""
        return LazyArrays({name: entry for name, entry in self._entries.items() if name not in names})
