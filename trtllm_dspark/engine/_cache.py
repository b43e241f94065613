"""Key and value caches of one network: slots as rows, a length that follows what is stored."""

from __future__ import annotations

import math
import mmap

import numpy as np

from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.errors import DeviceError

CACHE_MULTIPLE = 64
"""Lengths are multiples of this: ONNX Runtime's sums then group the same way whatever the length."""
_MIN_LENGTH = 4 * CACHE_MULTIPLE
# Passes in a row that must need less than half of the length before it shrinks.
_PATIENCE = 32


class KvCache:
    """`[num_slots, Hkv, C, D]` float32 arrays, K and V of each layer.

    Attention reads a row's whole length C, so C follows the longest row in use instead of the longest allowed one and
    nothing has to be sliced. Arrays are zero-filled (whatever lies behind a row's end must be finite) and untouched
    pages are never resident. Tokens of slots that do not fit after C shrank are kept aside until their slot is used.
    """

    def __init__(self, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, max_length: int) -> None:
        """Allocate the shortest caches; `max_length` is in tokens and bounds what a pass may use."""
        self.num_slots = num_slots
        self.max_length = _round_up(max_length)
        self.length = min(_MIN_LENGTH, self.max_length)
        self.generation = 0
        self._row = (num_kv_heads, head_dim)
        self._used = np.zeros(num_slots, np.int64)
        self._aside: dict[int, dict[str, FloatArray]] = {}
        self._short_passes = 0
        self.arrays: dict[str, FloatArray] = {
            f"{kind}.{layer}": self._zeros(self.length) for layer in range(num_layers) for kind in "kv"
        }

    def _zeros(self, length: int) -> FloatArray:
        heads, head_dim = self._row
        shape = (self.num_slots, heads, length, head_dim)
        # A mapping of its own is zero without being touched and goes back to the system with the array. From the C
        # allocator neither holds once a large block was freed, which cost 120 MB at 4 x 1,024 tokens.
        size = math.prod(shape) * np.dtype(np.float32).itemsize
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.float32).reshape(shape)

    def prepare(self, first_slot: int, starts: IntArray, width: int) -> None:
        """Make room for a pass that writes `width` tokens a row from `starts` [R] on; earlier tokens are kept.

        Raises:
            DeviceError: more than the limit.
        """
        needed = int(starts.max()) + width
        if needed > self.max_length:
            raise DeviceError(f"a pass needs a cache of {needed} tokens a slot, the engine has {self.max_length}")
        self._used[first_slot : first_slot + starts.size] = starts
        if needed > self.length:
            # An eighth ahead: copying then costs a small share of the passes between two copies.
            self._resize(min(self.max_length, _round_up(needed + needed // 8)))
        self._short_passes = self._short_passes + 1 if 2 * _round_up(needed) < self.length else 0
        if self._short_passes > _PATIENCE and self.length > _MIN_LENGTH:
            self._resize(max(_round_up(needed + needed // 8), _MIN_LENGTH))
        for slot in [s for s in self._aside if first_slot <= s < first_slot + starts.size]:
            self._restore(slot, int(starts[slot - first_slot]))

    def commit(self, first_slot: int, ends: IntArray) -> None:
        """Record that the rows of a pass now hold `ends` [R] tokens."""
        self._used[first_slot : first_slot + ends.size] = ends

    def _restore(self, slot: int, num_tokens: int) -> None:
        for name, kept in self._aside.pop(slot).items():
            self.arrays[name][slot, :, :num_tokens] = kept[:, :num_tokens]

    def _resize(self, length: int) -> None:
        for slot in np.flatnonzero(self._used > length):
            if slot not in self._aside:
                self._aside[int(slot)] = {n: a[slot, :, : self._used[slot]].copy() for n, a in self.arrays.items()}
        for name, old in self.arrays.items():
            new = self._zeros(length)
            for slot, used in enumerate(self._used):
                if slot not in self._aside:
                    new[slot, :, :used] = old[slot, :, :used]
            self.arrays[name] = new
        self.length = length
        self.generation += 1
        self._short_passes = 0

    def copy_slot(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of one slot to another."""
        self._aside.pop(destination, None)
        if source in self._aside:
            self.prepare(source, np.array([num_tokens], np.int64), 0)
        for array in self.arrays.values():
            array[destination, :, :num_tokens] = array[source, :, :num_tokens]
        self._used[destination] = num_tokens


def _round_up(length: int) -> int:
    return -(-length // CACHE_MULTIPLE) * CACHE_MULTIPLE
