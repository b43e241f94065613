"""Named arrays in one piece of memory, and page-locked host memory that is never reused before its copy is done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trtllm_dspark.engine.tensorrt.device import Device, Shape

_ALIGNMENT = 256


class Layout:
    """Where each named array lies inside one buffer.

    Args:
        arrays: name -> (shape, dtype).
    """

    def __init__(self, arrays: Mapping[str, tuple[Shape, DTypeLike]]) -> None:
        self._arrays = {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in arrays.items()}
        self._offsets: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        end = 0
        for name, (shape, dtype) in self._arrays.items():
            self._offsets[name] = end
            self._sizes[name] = size = math.prod(shape) * dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end

    def addresses(self, base: int) -> dict[str, int]:
        """Return the address of every array of a buffer that begins at `base`."""
        return {name: base + offset for name, offset in self._offsets.items()}

    def views(self, buffer: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the arrays inside a host buffer of uint8."""
        views = {}
        for name, (shape, dtype) in self._arrays.items():
            start = self._offsets[name]
            views[name] = buffer[start : start + self._sizes[name]].view(dtype).reshape(shape)
        return views


def upload(device: Device, address: int, array: NDArray[Any], stream: int) -> None:
    """Copy an array to the device and wait for it: for loading, not for rounds."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if flat.size == 0:
        return
    pinned = device.allocate_pinned(flat.size)
    pinned[: flat.size] = flat
    device.to_device(address, pinned[: flat.size], stream)
    event = device.create_event()
    device.record(event, stream)
    device.synchronize(event)
    device.free_pinned(pinned)


@dataclass(slots=True)
class Pinned:
    """A piece of page-locked memory. It belongs to the device from `give` to the event, else to the host.

    Attributes:
        views: arrays inside it, where its ring has a layout.
    """

    memory: NDArray[Any]
    event: int
    views: dict[str, NDArray[Any]]
    given: bool = False
    read: bool = True


@dataclass(slots=True)
class PinnedRing:
    """Pieces of page-locked memory, used in turn.

    Attributes:
        device: allocates and waits.
        depth: pieces; one more than rounds in flight, so that taking one never waits in practice.
        layout: what lies in a piece; None = pieces of any size, which grow when more is asked for.
        waits: how often `take` found a piece that had been given away: it then waits for that piece's event.
    """

    device: Device
    depth: int
    layout: Layout | None = None
    waits: int = 0
    _pieces: list[Pinned] = field(default_factory=list)
    _next: int = 0

    def __post_init__(self) -> None:
        for _ in range(self.depth):
            memory = self.device.allocate_pinned(0 if self.layout is None else self.layout.num_bytes)
            views = {} if self.layout is None else self.layout.views(memory)
            self._pieces.append(Pinned(memory, self.device.create_event(), views))

    def take(self, num_bytes: int = 0) -> Pinned:
        """Return a piece that belongs to the host.

        Raises:
            RuntimeError: the next piece holds results that nobody read.
        """
        piece = self._pieces[self._next]
        if not piece.read:
            raise RuntimeError("more rounds in flight than the ring of pinned buffers was made for")
        self._next = (self._next + 1) % self.depth
        if piece.given:
            self.waits += 1
            self.wait(piece)
        if piece.memory.size < num_bytes:
            self.device.free_pinned(piece.memory)
            piece.memory = self.device.allocate_pinned(num_bytes)
        return piece

    def give(self, piece: Pinned, stream: int, *, results: bool = False) -> None:
        """Hand a piece over to copies that were enqueued on `stream`; `results` holds it until `release`."""
        self.device.record(piece.event, stream)
        piece.given = True
        piece.read = not results

    def wait(self, piece: Pinned) -> None:
        """Wait until the copies of a piece are done; it belongs to the host again."""
        self.device.synchronize(piece.event)
        piece.given = False

    def release(self, piece: Pinned) -> None:
        """Say that the results in a piece were read."""
        piece.read = True
