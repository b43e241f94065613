"""One plan with the memory its passes read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtllm_dspark.engine.tensorrt._caches import ITEM_BYTES, SlotCache
from trtllm_dspark.engine.tensorrt.device import Device, Plan, PlanContext, Shape
from trtllm_dspark.errors import DeviceError, EngineError


class Network:
    """A plan, its caches, and where its other tensors lie.

    A pass names the shape of every input but the caches. Where their rows are free they are the slots from `first_slot`
    on; where they are fixed a pass sees all slots, and other inputs say which it means.

    Args:
        device: runs it.
        plan: the network.
        caches: those it updates.
        memory: addresses of inputs and outputs that the caller reads or writes.
        dtypes: their types.
        scratch: activation memory, shared by networks whose passes never overlap.

    Raises:
        EngineError: the plan has an input that nobody writes, or caches that are not updated in place.
        DeviceError: the device has no room.
    """

    def __init__(
        self,
        device: Device,
        plan: Plan,
        caches: Sequence[SlotCache],
        memory: Mapping[str, int],
        dtypes: Mapping[str, str],
        scratch: int,
    ) -> None:
        self._plan, self._caches, self._scratch = plan, caches, scratch
        self._addresses = {name: memory[name] for name in plan.tensors if name in memory}
        for name, tensor in plan.tensors.items():
            if name in memory:
                if tensor.dtype != dtypes[name]:
                    raise EngineError(
                        f"{name} of the plan is {tensor.dtype}, this version reads {dtypes[name]}; "
                        "build the engine again"
                    )
                continue
            if self._owns(name):
                past = name.replace("present_", "past_", 1)
                if not tensor.is_input and tensor.aliases not in (None, past):
                    raise EngineError(f"{name} of the plan updates {tensor.aliases!r}, not {past!r}; build it again")
                continue
            if tensor.is_input:
                raise EngineError(
                    f"the plan has an input {name!r} this version does not know; build the engine with this version"
                )
            # Rotated queries: outputs only so that the builder keeps the caches in place.
            self._addresses[name] = device.allocate(self._largest(tensor.shape) * ITEM_BYTES[tensor.dtype])
        self._eager: dict[int, PlanContext] = {}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs but the caches."""
        return tuple(name for name, tensor in self._plan.tensors.items() if tensor.is_input and not self._owns(name))

    def dims(self, name: str) -> Shape:
        """Return the extents of a tensor, -1 where one is free.

        Raises:
            EngineError: the plan has no such tensor.
        """
        if name not in self._plan.tensors:
            raise EngineError(f"the plan has no tensor {name!r}; build the engine with this version")
        return self._plan.tensors[name].shape

    def profile(self, shapes: Mapping[str, Shape]) -> int:
        """Return the first profile that takes a pass of these shapes.

        Raises:
            DeviceError: none does.
        """
        for profile in range(self._plan.num_profiles):
            if all(self._inside(name, shape, profile) for name, shape in shapes.items()):
                return profile
        raise DeviceError(
            "a pass of shapes "
            + ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            + " fits no profile of the engine; build it with larger limits"
        )

    def bound(
        self, shapes: Mapping[str, Shape], stream: int, *, memory: Mapping[str, int] | None = None
    ) -> PlanContext:
        """Return a new context for passes of these shapes and addresses and no others, as a CUDA graph needs it."""
        context = self._plan.context(self.profile(shapes), self._scratch, stream)
        self._bind(context, shapes, 0, memory or {})
        return context

    def enqueue(
        self,
        shapes: Mapping[str, Shape],
        stream: int,
        *,
        first_slot: int = 0,
        memory: Mapping[str, int] | None = None,
    ) -> None:
        """Enqueue one pass of any shapes that fit a profile; `memory` replaces addresses for this pass."""
        profile = self.profile(shapes)
        if profile not in self._eager:
            self._eager[profile] = self._plan.context(profile, self._scratch, stream)
        self._bind(self._eager[profile], shapes, first_slot, memory or {})
        self._eager[profile].enqueue(stream)

    def close(self) -> None:
        """Release contexts and plan; memory is the device's."""
        for context in self._eager.values():
            context.close()
        self._eager.clear()
        self._plan.close()

    def _bind(
        self, context: PlanContext, shapes: Mapping[str, Shape], first_slot: int, memory: Mapping[str, int]
    ) -> None:
        whole, addresses = dict(shapes), {**self._addresses, **memory}
        for name, tensor in self._plan.tensors.items():
            if tensor.is_input and self._owns(name):
                rows = tensor.shape[0] if tensor.shape[0] >= 0 else shapes["write_indices"][0]
                whole[name] = (rows, *tensor.shape[1:])
        for cache in self._caches:
            addresses |= {name: at for name, at in cache.bindings(first_slot).items() if name in self._plan.tensors}
        context.bind(whole, addresses)

    def _owns(self, name: str) -> bool:
        return any(cache.owns(name) for cache in self._caches)

    def _inside(self, name: str, shape: Shape, profile: int) -> bool:
        low, high = self._plan.tensors[name].ranges[profile]
        return len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))

    def _largest(self, shape: Shape) -> int:
        """Return the elements of a rotated query [R, H, S, D] at most."""
        rows, heads, width, size = shape
        most = 0
        for profile in range(self._plan.num_profiles):
            num_rows = self._plan.tensors["write_indices"].ranges[profile][1][0]
            row_len = width if width > 0 else self._plan.tensors["pad_index"].ranges[profile][1][1]
            most = max(most, (rows if rows > 0 else num_rows) * heads * row_len * size)
        return most
