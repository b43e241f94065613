"""Key and value caches on the device: a slot a row, bound as input and output of a pass at one address."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trtllm_dspark.engine.tensorrt.device import Device, PlanTensor
from trtllm_dspark.errors import EngineError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "bool": 1}


class SlotCache:
    """`[num_slots, Hkv, C, D]` per layer, K and V; extents come from the plan.

    Args:
        device: where it lies.
        tensors: of the plan that owns it.
        num_slots: rows.
        min_length: tokens a slot must hold, padding of the widest row included.

    Raises:
        EngineError: the plan's caches differ among layers or are too short.
        DeviceError: the device has no room.
    """

    def __init__(self, device: Device, tensors: Mapping[str, PlanTensor], num_slots: int, min_length: int) -> None:
        past = {name: tensor for name, tensor in tensors.items() if name.startswith("past_")}
        kinds = {(tensor.shape[1:], tensor.dtype) for tensor in past.values()}
        if len(kinds) != 1:
            raise EngineError(f"a plan's caches must be alike, found {sorted(kinds)}; build the engine again")
        ((shape, self.dtype),) = kinds
        self.num_heads, self.length, self.head_dim = shape
        if self.length < min_length:
            raise EngineError(
                f"the plan's caches hold {self.length} tokens, the engine's limits need {min_length}; "
                "build the engine again"
            )
        self._device = device
        self._token_bytes = self.head_dim * ITEM_BYTES[self.dtype]
        self.slot_bytes = self.num_heads * self.length * self._token_bytes
        self._addresses = {name.removeprefix("past_"): device.allocate(num_slots * self.slot_bytes) for name in past}

    def bindings(self, first_slot: int) -> dict[str, int]:
        """Return the address of every past_ and present_ tensor of a pass over slots from `first_slot` on."""
        offset = first_slot * self.slot_bytes
        found = {}
        for name, address in self._addresses.items():
            found[f"past_{name}"] = found[f"present_{name}"] = address + offset
        return found

    def owns(self, name: str) -> bool:
        """Tell whether a tensor of a plan is one of the caches."""
        return name.partition("_")[0] in ("past", "present") and name.partition("_")[2] in self._addresses

    def copy_slot(self, source: int, destination: int, num_tokens: int, stream: int) -> None:
        """Enqueue a copy of the first `num_tokens` tokens of one slot to another."""
        pitch = self.length * self._token_bytes
        width = int(np.clip(num_tokens, 0, self.length)) * self._token_bytes
        for address in self._addresses.values():
            self._device.copy_rows(
                address + destination * self.slot_bytes,
                address + source * self.slot_bytes,
                pitch=pitch,
                width=width,
                rows=self.num_heads,
                stream=stream,
            )
