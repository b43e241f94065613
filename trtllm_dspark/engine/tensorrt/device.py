"""The thin device layer: everything the TensorRT engine asks of CUDA and of a TensorRT runtime.

Addresses, streams, events and graphs are plain integers. Every call with a `stream` only enqueues. Tests put a
recording device in this place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """An input or output of a plan.

    Attributes:
        dtype: `float32`, `float16`, `bfloat16`, `int32`, `int64` or `bool`.
        shape: -1 where an extent is free.
        ranges: smallest and largest shape of each profile; empty for outputs.
        aliases: the input whose memory this output updates in place, or None.
    """

    name: str
    is_input: bool
    dtype: str
    shape: Shape
    ranges: tuple[tuple[Shape, Shape], ...] = ()
    aliases: str | None = None


class PlanContext(Protocol):
    """A plan with shapes and addresses bound; one pass at a time."""

    def bind(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Set the shape of every input and the address of every tensor.

        Raises:
            DeviceError: a shape is outside the profile, or a tensor is unknown or left out.
        """
        ...

    def enqueue(self, stream: int) -> None:
        """Enqueue one pass.

        Raises:
            DeviceError: the runtime refuses it.
        """
        ...

    def close(self) -> None:
        """Release it; no pass of it may be running."""
        ...


class Plan(Protocol):
    """A deserialized plan."""

    @property
    def tensors(self) -> Mapping[str, PlanTensor]:
        """Its inputs and outputs by name."""
        ...

    @property
    def num_profiles(self) -> int:
        """Shape ranges it was compiled for."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Activation memory a context needs; contexts whose passes never overlap may share it."""
        ...

    def context(self, profile: int, scratch: int, stream: int) -> PlanContext:
        """Return a new context of one profile; `scratch` is an address of `scratch_bytes`."""
        ...

    def close(self) -> None:
        """Release the plan's weights."""
        ...


class Device(Protocol):
    """One GPU, or something that behaves like one."""

    @property
    def name(self) -> str:
        """What it is, in words."""
        ...

    @property
    def architecture(self) -> str:
        """Its compute capability, such as sm89."""
        ...

    @property
    def has_kernels(self) -> bool:
        """Whether `launch` can be called."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """Return the address of zero-filled memory, 256-byte aligned.

        Raises:
            DeviceError: the device has no room.
        """
        ...

    def free(self, address: int) -> None:
        """Release memory of `allocate`."""
        ...

    def allocate_pinned(self, num_bytes: int) -> NDArray[Any]:
        """Return page-locked host memory as [num_bytes] uint8."""
        ...

    def free_pinned(self, array: NDArray[Any]) -> None:
        """Release memory of `allocate_pinned`."""
        ...

    def create_stream(self) -> int:
        """Return a stream that does not wait for the default one."""
        ...

    def create_event(self) -> int:
        """Return an event that takes the time."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Mark the end of what the stream holds so far."""
        ...

    def synchronize(self, event: int) -> None:
        """Wait on the host until the event's mark is reached; an event never recorded is reached."""
        ...

    def elapsed_us(self, start: int, end: int) -> float:
        """Return the microseconds between two events that were reached."""
        ...

    def to_device(self, address: int, source: NDArray[Any], stream: int) -> None:
        """Copy pinned memory to the device; `source` belongs to the copy until an event behind it is reached."""
        ...

    def to_host(self, target: NDArray[Any], address: int, stream: int) -> None:
        """Copy to pinned memory; `target` may be read once an event behind the copy is reached."""
        ...

    def copy_rows(self, target: int, source: int, *, pitch: int, width: int, rows: int, stream: int) -> None:
        """Copy the first `width` bytes of each of `rows` rows that are `pitch` bytes apart, device to device."""
        ...

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """Fill with zeros."""
        ...

    def begin_capture(self, stream: int) -> None:
        """Record what is enqueued on the stream instead of running it."""
        ...

    def end_capture(self, stream: int) -> int:
        """Return the recorded work as a graph.

        Raises:
            DeviceError: something that was enqueued cannot be captured; the stream is usable again.
        """
        ...

    def launch_graph(self, graph: int, stream: int) -> None:
        """Enqueue a graph."""
        ...

    def free_graph(self, graph: int) -> None:
        """Release a graph; it must not be running."""
        ...

    def load_plan(self, path: Path) -> Plan:
        """Deserialize a plan.

        Raises:
            EngineError: it was compiled for another device or version, or is damaged.
        """
        ...

    def launch(self, op: str, stream: int, **params: int | float | None) -> None:
        """Launch a kernel of the kernel library (docs/kernels.md).

        Raises:
            DeviceError: there is no kernel library, or a value is refused.
        """
        ...

    def workspace_bytes(self, op: str, **params: int | float | None) -> int:
        """Return the scratch a kernel needs; pointers may be left out."""
        ...

    def close(self) -> None:
        """Release everything that is left; calling it twice is harmless."""
        ...
