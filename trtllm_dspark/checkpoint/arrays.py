"""Named tensors that are read from disk only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trtllm_dspark.errors import CheckpointError

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class LazyArray:
    """One tensor of a checkpoint: its shape is known, its values are read by `load`."""

    source_name: str
    """Name inside the checkpoint file, for messages."""
    shape: tuple[int, ...]
    load: Callable[[], Array]

    def map(self, function: Callable[[Array], Array], shape: tuple[int, ...] | None = None) -> LazyArray:
        """Return the tensor whose values are `function` of this one's; `shape` is the new shape if it changes."""
        load = self.load
        return LazyArray(self.source_name, self.shape if shape is None else shape, lambda: function(load()))


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
