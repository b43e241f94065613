"""Target and drafter plans with their caches and every array their passes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.tensorrt._caches import SlotCache
from trtllm_dspark.engine.tensorrt._memory import Layout, upload
from trtllm_dspark.engine.tensorrt._network import Network
from trtllm_dspark.engine.tensorrt.device import Device, Plan, PlanTensor
from trtllm_dspark.errors import EngineError

TARGET, CONTEXT, BLOCK = "target", "drafter_context", "drafter_block"
"""Names of the plans of an engine."""
SLOT_STATE = ("anchors", "positions", "remaining")
"""State of each slot, int32."""
_DTYPES = {
    **dict.fromkeys(("input_ids", "positions", "pack_index", "pad_index", "write_indices", "logit_rows"), "int64"),
    **dict.fromkeys(("logits", "features", "base_logits", "hidden"), "float32"),
}
"""Types of what passes read and write besides caches and rotated queries."""


@dataclass(frozen=True, slots=True)
class SlotModel:
    """What rounds need of a model, whatever its plans.

    Attributes:
        stream: where all passes run, in order.
        memory: address of every shared array. Inputs and outputs of passes, and the state of each slot.
        decode_tokens: tokens of a decoding pass, at most.
        target: the plan that reads tokens.
        cache: of the target.
        drafter_cache: of the drafter, or None.
    """

    device: Device
    stream: int
    limits: EngineLimits
    memory: dict[str, int]
    decode_tokens: int
    target: Network
    cache: SlotCache
    drafter_cache: SlotCache | None

    def close(self) -> None:
        """Release the plans; memory is the device's."""
        self.target.close()

    def copy_slot(self, source: int, destination: int, num_tokens: int, num_context: int) -> None:
        """Enqueue the move of a slot's caches and state."""
        self.cache.copy_slot(source, destination, num_tokens, self.stream)
        if self.drafter_cache is not None:
            self.drafter_cache.copy_slot(source, destination, num_context, self.stream)
        for name in SLOT_STATE:
            base = self.memory[name]
            self.device.copy_rows(
                base + 4 * destination, base + 4 * source, pitch=4, width=4, rows=1, stream=self.stream
            )


@dataclass(frozen=True, slots=True)
class Drafter:
    """The drafter's two plans over one cache."""

    config: DrafterConfig
    context: Network
    block: Network


@dataclass(frozen=True, slots=True)
class Model(SlotModel):
    """Plans of the `trt_native` lowering; `drafter_cache` is the drafter's.

    Attributes:
        drafter: its plans, or None.
    """

    drafter: Drafter | None

    def close(self) -> None:
        """Release the plans; memory is the device's."""
        SlotModel.close(self)
        if self.drafter is not None:
            self.drafter.context.close()
            self.drafter.block.close()


def load_model(
    device: Device,
    plans: Mapping[str, Plan],
    target: ModelConfig,
    drafter: DrafterConfig | None,
    limits: EngineLimits,
) -> Model:
    """Allocate what the passes of these plans need.

    Raises:
        EngineError: the plans do not fit the configuration or the limits.
        DeviceError: the device has no room.
    """
    wanted = [TARGET] if drafter is None else [TARGET, CONTEXT, BLOCK]
    if missing := sorted(set(wanted) - set(plans)):
        raise EngineError(f"the engine has no plan {missing[0]}; build it again")
    stream = device.create_stream()
    tensors = plans[TARGET].tensors
    _check(tensors, target, drafter, limits)
    memory = _allocate(device, tensors, drafter, limits, stream)
    scratch = device.allocate(max(plans[name].scratch_bytes for name in wanted))
    widest = max(limits.max_num_tokens, limits.max_draft_len + 1)
    cache = SlotCache(device, tensors, limits.max_batch_size, limits.max_seq_len + widest - 1)
    passes = {name: memory[name] for name in ("input_ids", "pack_index", "pad_index", "write_indices", "features")}
    passes |= {"positions": memory["token_positions"], "logit_rows": memory["identity"], "logits": memory["logits"]}
    network = Network(device, plans[TARGET], [cache], passes, _DTYPES, scratch)
    own = drafter_cache = None
    if drafter is not None:
        widest = max(limits.max_num_tokens, drafter.block_size)
        drafter_cache = SlotCache(
            device, plans[CONTEXT].tensors, limits.max_batch_size, limits.max_seq_len + widest - 1
        )
        caches = [drafter_cache]
        context = Network(device, plans[CONTEXT], caches, passes, _DTYPES, scratch)
        block = {name: memory[name] for name in ("write_indices", "base_logits", "hidden")}
        block["input_ids"] = memory["block_ids"]
        own = Drafter(drafter, context, Network(device, plans[BLOCK], caches, block, _DTYPES, scratch))
        widths = {"base_logits": limits.draft_vocab_size, "hidden": drafter.backbone.hidden_size}
        for name, width in widths.items():
            if own.block.dims(name)[1:] != (limits.max_draft_len, width):
                raise EngineError(
                    f"{name} of the block's plan has extents {list(own.block.dims(name)[1:])}, the engine says "
                    f"[{limits.max_draft_len}, {width}]; build the engine again"
                )
    decode = decode_tokens(tensors)
    return Model(device, stream, limits, memory, decode, network, cache, drafter_cache, own)


def decode_tokens(tensors: Mapping[str, PlanTensor]) -> int:
    """Return the tokens of a decoding pass of a target's plan at most: each wants its logits."""
    return min(tensors[name].ranges[0][1][0] for name in ("input_ids", "logit_rows"))


def _allocate(
    device: Device,
    tensors: Mapping[str, PlanTensor],
    drafter: DrafterConfig | None,
    limits: EngineLimits,
    stream: int,
) -> dict[str, int]:
    """Allocate index tensors, results of passes and the slots' state; arrays that never change are filled."""
    tokens, logits = most_elements(tensors, "input_ids"), most_elements(tensors, "logit_rows")
    rows, gamma = limits.max_batch_size, limits.max_draft_len
    arrays = {
        **{name: ((rows,), np.int32) for name in SLOT_STATE},
        "unit_rows": ((rows + 1,), np.int32),
        "identity": ((logits,), np.int64),
        "logit_rows": ((logits,), np.int64),
        "input_ids": ((tokens,), np.int64),
        "token_positions": ((tokens,), np.int64),
        "pack_index": ((tokens,), np.int64),
        "pad_index": ((most_elements(tensors, "pad_index"),), np.int64),
        "write_indices": ((rows,), np.int64),
        "block_ids": ((rows, 0 if drafter is None else drafter.block_size), np.int64),
        "logits": ((logits, limits.vocab_size), np.float32),
        "features": ((tokens, limits.feature_size), np.float32),
        "base_logits": ((rows, gamma, limits.draft_vocab_size), np.float32),
        "hidden": ((rows, gamma, 0 if drafter is None else drafter.backbone.hidden_size), np.float32),
    }
    layout = Layout(arrays)
    memory = layout.addresses(device.allocate(layout.num_bytes))
    upload(device, memory["unit_rows"], np.arange(rows + 1, dtype=np.int32), stream)
    upload(device, memory["identity"], np.arange(logits, dtype=np.int64), stream)
    return memory


def most_elements(tensors: Mapping[str, PlanTensor], name: str) -> int:
    """Return the elements of an input at most, over all profiles."""
    return max(int(np.prod(high, dtype=np.int64)) for _, high in tensors[name].ranges)


def _check(
    tensors: Mapping[str, PlanTensor], target: ModelConfig, drafter: DrafterConfig | None, limits: EngineLimits
) -> None:
    for name in ("input_ids", "positions", "pad_index", "pack_index", "write_indices", "logit_rows", "logits"):
        if name not in tensors:
            raise EngineError(
                f"the target's plan has no tensor {name!r}: this runtime runs plans of the trt_native lowering; build "
                "the engine again with this version"
            )
    if tensors["logits"].shape[-1] != target.vocab_size:
        raise EngineError(f"the plan has logits of {tensors['logits'].shape[-1]} tokens, not {target.vocab_size}")
    if drafter is not None and ("features" not in tensors or tensors["features"].shape[-1] != drafter.feature_size):
        raise EngineError("the target's plan does not give the drafter its features; build both together")
    rows = min(high[0] for _, high in tensors["write_indices"].ranges)
    if rows < limits.max_batch_size:
        raise EngineError(
            f"the plan takes {rows} requests, the engine says {limits.max_batch_size}; build the engine again"
        )
