"""A device in host memory that records what it is asked to do, and does it as late or as early as a GPU might.

Work is queued. A *late* device runs nothing before the host waits for an event behind it, so host memory that is reused
too early holds the wrong values when it is copied; an *early* one runs everything at once, so results that are
overwritten too early are gone. Plans run on ONNX Runtime, kernels are the CUDA sources compiled for the host.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.core_kernels import CoreKernels
from trtllm_dspark.engine.tensorrt.device import Plan, PlanContext, PlanTensor, Shape
from trtllm_dspark.errors import DeviceError
from trtllm_dspark.plugins import KernelLibrary

ITEM = {"float32": np.float32, "int32": np.int32, "int64": np.int64}
_ALIGNMENT = 256
NOT_CAPTURABLE = {"to_device", "to_host", "record"}
"""What a round must not do while it is captured: a replay would repeat it with the same host memory."""


@dataclass(eq=False)
class Op:
    """One thing enqueued on a stream.

    Attributes:
        kind: `pass`, `launch`, `graph`, `to_device`, `to_host`, `copy_rows`, `clear` or `record`.
        name: the plan, the kernel, or "".
        detail: shapes, addresses or parameters.
        parts: of a graph.
    """

    kind: str
    name: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Op, ...] = ()
    run: Callable[[], None] = lambda: None
    done: bool = False


@dataclass
class Wait:
    """The host waited for the event that was recorded as number `at` of all ops."""

    event: int
    at: int


class RecordingDevice:
    """See the module.

    Args:
        kernels: kernel library for the host.
        heads: of the drafter; instead of a library, lets the core do what kernels do. Without both there are none.
        late: see the module.
    """

    def __init__(self, kernels: Path | None = None, *, heads: Any = None, late: bool = True) -> None:
        self.late = late
        self.ops: list[Op] = []
        self.waits: list[Wait] = []
        self.fail_pass: str | None = None
        self.fail_capture: str | None = None
        self.fail_wait = False
        self.closed = 0
        self.plans: dict[str, GraphPlan] = {}
        self._library = None if kernels is None else KernelLibrary(kernels)
        self._kernels: Any = self._library
        if heads is not None:
            self._kernels = CoreKernels(heads, self._view)
        self._memory: dict[int, NDArray[Any]] = {}
        self._starts: list[int] = []
        self._pinned: dict[int, NDArray[Any]] = {}
        self._queue: deque[Op] = deque()
        self._marks: dict[int, Op] = {}
        self._graphs: dict[int, tuple[Op, ...]] = {}
        self._recording: list[Op] | None = None
        self._broken: str | None = None
        self._handle = 100

    name = "a recording device"
    architecture = "sm89"

    @property
    def has_kernels(self) -> bool:
        return self._kernels is not None

    def allocate(self, num_bytes: int) -> int:
        self._refuse_in_capture("allocate")
        raw = np.zeros(num_bytes + 2 * _ALIGNMENT, np.uint8)
        address = -(-raw.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        start = address - raw.ctypes.data
        self._memory[address] = raw[start : start + num_bytes]
        bisect.insort(self._starts, address)
        return address

    def free(self, address: int) -> None:
        del self._memory[address]
        self._starts.remove(address)

    def allocate_pinned(self, num_bytes: int) -> NDArray[Any]:
        array = np.full(num_bytes, 0x7F, np.uint8)
        self._pinned[array.ctypes.data] = array
        return array

    def free_pinned(self, array: NDArray[Any]) -> None:
        assert not any(op.detail.get("host") is array for op in self._queue), "pinned memory freed under a copy"
        del self._pinned[array.ctypes.data]

    def create_stream(self) -> int:
        return self._new_handle()

    def create_event(self) -> int:
        return self._new_handle()

    def record(self, event: int, stream: int) -> None:
        self._marks[event] = self._enqueue(Op("record", detail={"event": event}))

    def synchronize(self, event: int) -> None:
        self._refuse_in_capture("synchronize")
        if self.fail_wait:
            raise DeviceError("planted failure of a wait")
        mark = self._marks.get(event)
        if mark is None:
            return
        self.waits.append(Wait(event, self.ops.index(mark)))
        while not mark.done:
            self._run(self._queue.popleft())

    def elapsed_us(self, start: int, end: int) -> float:
        first, last = self._marks[start], self._marks[end]
        assert first.done, "the event was never reached"
        assert last.done, "the event was never reached"
        return float(self.ops.index(last) - self.ops.index(first))

    def to_device(self, address: int, source: NDArray[Any], stream: int) -> None:
        self._check_pinned(source)
        target = self.bytes_at(address, source.nbytes)
        flat = source.reshape(-1).view(np.uint8)

        def run() -> None:
            target[:] = flat

        self._enqueue(Op("to_device", detail={"address": address, "host": source}, run=run))

    def to_host(self, target: NDArray[Any], address: int, stream: int) -> None:
        self._check_pinned(target)
        source = self.bytes_at(address, target.nbytes)
        flat = target.reshape(-1).view(np.uint8)
        # Whoever reads before the copy is done reads this.
        flat[:] = 0x7F

        def run() -> None:
            flat[:] = source

        self._enqueue(Op("to_host", detail={"address": address, "host": target}, run=run))

    def copy_rows(self, target: int, source: int, *, pitch: int, width: int, rows: int, stream: int) -> None:
        assert width <= pitch
        pairs = [
            (self.bytes_at(target + row * pitch, width), self.bytes_at(source + row * pitch, width))
            for row in range(rows)
        ]

        def run() -> None:
            for to, of in pairs:
                to[:] = of

        self._enqueue(Op("copy_rows", detail={"target": target, "source": source, "width": width}, run=run))

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        target = self.bytes_at(address, num_bytes)

        def run() -> None:
            target[:] = 0

        self._enqueue(Op("clear", detail={"address": address}, run=run))

    def begin_capture(self, stream: int) -> None:
        assert self._recording is None
        self._recording, self._broken = [], None

    def end_capture(self, stream: int) -> int:
        assert self._recording is not None
        parts, self._recording = tuple(self._recording), None
        if self._broken is not None:
            raise DeviceError(f"capture was broken by {self._broken}")
        handle = self._new_handle()
        self._graphs[handle] = parts
        return handle

    def launch_graph(self, graph: int, stream: int) -> None:
        parts = self._graphs[graph]

        def run() -> None:
            for part in parts:
                part.run()

        self._enqueue(Op("graph", parts=parts, detail={"graph": graph}, run=run))

    def free_graph(self, graph: int) -> None:
        assert not any(op.detail.get("graph") == graph for op in self._queue), "a graph was released while it runs"
        del self._graphs[graph]

    def load_plan(self, path: Path) -> Plan:
        return self.plans[path.name.partition(".")[0]]

    def launch(self, op: str, stream: int, **params: int | float | None) -> None:
        if self._library is not None:
            self._library._pack(op, params)
            self._check_pointers(op, params)

        def run() -> None:
            self._kernels.launch(op, **params)

        self._enqueue(Op("launch", op, dict(params), run=run))

    def workspace_bytes(self, op: str, **params: int | float | None) -> int:
        return int(self._kernels.workspace_bytes(op, **params))

    def close(self) -> None:
        assert not self._queue, "closed while work is running"
        self.closed += 1

    def finish(self) -> None:
        """Run everything that is queued."""
        while self._queue:
            self._run(self._queue.popleft())

    def read(self, address: int, shape: Shape, dtype: Any) -> NDArray[Any]:
        """Return a copy of device memory as it is now."""
        return self._view(address, shape, dtype).copy()

    def _view(self, address: int, shape: Shape, dtype: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes_at(address, size).view(dtype).reshape(shape)

    def bytes_at(self, address: int, num_bytes: int) -> NDArray[Any]:
        """Return a view of live device memory.

        Raises:
            AssertionError: it is not inside one allocation.
        """
        index = bisect.bisect_right(self._starts, address) - 1
        assert index >= 0, "an address below all memory"
        start = self._starts[index]
        block = self._memory[start]
        assert address - start + num_bytes <= block.size, "an access beyond an allocation"
        return block[address - start : address - start + num_bytes]

    def enqueue_pass(self, name: str, detail: dict[str, Any], run: Callable[[], None]) -> None:
        """Enqueue a pass of a plan."""
        if self.fail_pass == name:
            raise DeviceError(f"planted failure of {name}")
        if self._recording is not None and self.fail_capture == name:
            self._broken = name
        self._enqueue(Op("pass", name, detail, run=run))

    def pending(self, owner: Any) -> bool:
        """Whether a pass of `owner` is queued."""
        return any(op.detail.get("owner") is owner for top in self._queue for op in (top, *top.parts))

    def _enqueue(self, op: Op) -> Op:
        if self._recording is not None:
            if op.kind in NOT_CAPTURABLE:
                self._broken = op.kind
            self._recording.append(op)
            return op
        self.ops.append(op)
        self._queue.append(op)
        if not self.late:
            self.finish()
        return op

    def _run(self, op: Op) -> None:
        op.run()
        op.done = True

    def _refuse_in_capture(self, what: str) -> None:
        if self._recording is not None:
            self._broken = what

    def _check_pinned(self, array: NDArray[Any]) -> None:
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        assert array.flags.c_contiguous
        assert any(at <= start and end <= at + block.nbytes for at, block in self._pinned.items()), "not pinned"

    def _check_pointers(self, op: str, params: Mapping[str, Any]) -> None:
        assert self._library is not None
        for name, kind in self._library.fields(op).items():
            if kind == "pointer" and params[name] is not None:
                self.bytes_at(int(params[name]), 0)

    def _new_handle(self) -> int:
        self._handle += 1
        return self._handle


class GraphPlan:
    """A float32 graph of the `trt_native` lowering in a plan's place.

    Args:
        device: runs its passes.
        name: of the plan.
        session: ONNX Runtime session of the graph.
        profiles: (smallest, largest) extent of each symbol of each profile.
    """

    def __init__(
        self, device: RecordingDevice, name: str, session: Any, profiles: list[dict[str, tuple[int, int]]]
    ) -> None:
        self.device, self.name, self.session = device, name, session
        inputs, outputs = (
            [(value.name, _dtype(value.type), value.shape) for value in values]
            for values in (session.get_inputs(), session.get_outputs())
        )
        self._describe(inputs, outputs, profiles)

    def _describe(
        self,
        inputs: list[tuple[str, str, list[Any]]],
        outputs: list[tuple[str, str, list[Any]]],
        profiles: list[dict[str, tuple[int, int]]],
    ) -> None:
        self.num_profiles, self.scratch_bytes = len(profiles), 64
        self.closed = False
        self.contexts: list[GraphContext] = []
        tensors = {}
        for name, dtype, shape in inputs:
            ranges = tuple(
                (
                    tuple(dim if isinstance(dim, int) else sizes[dim][0] for dim in shape),
                    tuple(dim if isinstance(dim, int) else sizes[dim][1] for dim in shape),
                )
                for sizes in profiles
            )
            tensors[name] = PlanTensor(name, True, dtype, _free(shape), ranges)
        for name, dtype, shape in outputs:
            past = name.replace("present_", "past_", 1) if name.startswith("present_") else None
            tensors[name] = PlanTensor(name, False, dtype, _free(shape), aliases=past)
        self.tensors: Mapping[str, PlanTensor] = tensors

    def run(self, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return every output of a pass."""
        names = [name for name, tensor in self.tensors.items() if not tensor.is_input]
        return dict(zip(names, self.session.run(names, feeds), strict=True))

    def context(self, profile: int, scratch: int, stream: int) -> PlanContext:
        assert not self.closed
        self.device._refuse_in_capture("context")
        self.device.bytes_at(scratch, self.scratch_bytes)
        self.contexts.append(GraphContext(self, profile))
        return self.contexts[-1]

    def close(self) -> None:
        assert all(context.closed for context in self.contexts), "a plan was released before its contexts"
        self.closed = True


class GraphContext:
    """See `device.PlanContext`."""

    def __init__(self, plan: GraphPlan, profile: int) -> None:
        self.plan, self.profile = plan, profile
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.closed = False

    def bind(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        assert not self.closed
        tensors = self.plan.tensors
        inputs = {name for name, tensor in tensors.items() if tensor.is_input}
        assert set(shapes) == inputs, f"shapes for {sorted(set(shapes) ^ inputs)}"
        assert set(addresses) == set(tensors), f"addresses for {sorted(set(addresses) ^ set(tensors))}"
        for name, shape in shapes.items():
            low, high = tensors[name].ranges[self.profile]
            assert all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)), f"{name} {shape} {low} {high}"
            self.plan.device.bytes_at(addresses[name], _num_bytes(shape, tensors[name].dtype))
        for name, tensor in tensors.items():
            if tensor.aliases is not None:
                assert addresses[name] == addresses[tensor.aliases], f"{name} is not updated in place"
        self.shapes, self.addresses = dict(shapes), dict(addresses)

    def enqueue(self, stream: int) -> None:
        assert not self.closed
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        detail = {"shapes": shapes, "addresses": addresses, "profile": self.profile, "owner": self}
        self.plan.device.enqueue_pass(self.plan.name, detail, lambda: self._run(shapes, addresses))

    def close(self) -> None:
        assert not self.plan.device.pending(self), "a context was released while its pass runs"
        self.closed = True

    def _run(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        device, tensors = self.plan.device, self.plan.tensors
        feeds = {name: device.read(addresses[name], shape, ITEM[tensors[name].dtype]) for name, shape in shapes.items()}
        results = self.plan.run(feeds)
        _check_apart(self.plan, addresses, feeds, results)
        for name, value in results.items():
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            device.bytes_at(addresses[name], flat.size)[:] = flat


def _check_apart(
    plan: GraphPlan,
    addresses: Mapping[str, int],
    feeds: Mapping[str, NDArray[Any]],
    results: Mapping[str, NDArray[Any]],
) -> None:
    """Refuse an output over an input it does not update in place, or over another output."""
    ends = {name: addresses[name] + value.nbytes for name, value in (*feeds.items(), *results.items())}
    for name in results:
        for other, end in ends.items():
            if other in (name, plan.tensors[name].aliases):
                continue
            assert ends[name] <= addresses[other] or end <= addresses[name], f"{name} of {plan.name} overlaps {other}"


def _dtype(text: str) -> str:
    return {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int32)": "int32"}[text]


def _free(shape: list[Any]) -> Shape:
    return tuple(dim if isinstance(dim, int) else -1 for dim in shape)


def _num_bytes(shape: Shape, dtype: str) -> int:
    return int(np.prod(shape)) * np.dtype(ITEM[dtype]).itemsize
