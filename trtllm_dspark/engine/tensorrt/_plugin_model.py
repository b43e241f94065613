"""The two plans of an engine with plugins, with their caches and every array their passes share.

Both plans see all slots of every cache: `page_table` says which slot a row means, so no pass begins at another address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.tensorrt._arrays import RoundArrays, round_work
from trtllm_dspark.engine.tensorrt._caches import ITEM_BYTES, SlotCache
from trtllm_dspark.engine.tensorrt._memory import Layout, upload
from trtllm_dspark.engine.tensorrt._model import SLOT_STATE, TARGET, SlotModel, decode_tokens, most_elements
from trtllm_dspark.engine.tensorrt._network import Network
from trtllm_dspark.engine.tensorrt.device import Device, Plan, PlanTensor, Shape
from trtllm_dspark.errors import EngineError

DRAFTER = "drafter"
"""Name of the draft plan; the verify plan is the target's."""
_REMEDY = "build the engine again with this version"
_FLOATS = ("float16", "bfloat16", "float32")
_ROWS = dict.fromkeys(("page_table", "top_k", "positions"), "int32") | {
    "temperature": "float32",
    "top_p": "float32",
    "seed": "int64",
}
_DRAFTED = dict.fromkeys(("draft_tokens", "draft_entries", "candidates"), "int32") | {
    "draft_laws": "float32",
    "draft_totals": "int64",
    "draft_logits": "float32",
}
_TOKENS = dict.fromkeys(("token_request", "token_position", "cu_tokens"), "int32")
VERIFY_DTYPES = {
    **_ROWS,
    **_DRAFTED,
    **_TOKENS,
    **dict.fromkeys(("input_ids", "logit_rows", "cu_logits", "out_tokens", "emitted_len", "status"), "int32"),
}
"""Types of the verify plan's tensors besides logits and caches."""
DRAFT_DTYPES = {
    **_ROWS,
    **_DRAFTED,
    **_TOKENS,
    **dict.fromkeys(("anchors", "caps", "live", "limits", "survival", "draft_status", "verify_len", "report"), "int32"),
    **dict.fromkeys(("thresholds", "terms", "step_time_us", "inv_temperature", "position_bias"), "float32"),
    "token_ids": "int32",
    "confidence": "float32",
}
"""The same of the draft plan."""


@dataclass(frozen=True, slots=True)
class PluginModel(SlotModel):
    """Plans of the `trt_plugin` lowering.

    Attributes:
        draft: the draft plan, or None without a drafter.
        arrays: of its rounds; the plans are bound to them.
        has_confidence: whether the draft plan has a confidence head.
    """

    draft: Network | None
    arrays: RoundArrays
    has_confidence: bool

    def close(self) -> None:
        """Release the plans; memory is the device's."""
        SlotModel.close(self)
        if self.draft is not None:
            self.draft.close()


def load_plugin_model(
    device: Device,
    plans: Mapping[str, Plan],
    target: ModelConfig,
    drafter: DrafterConfig | None,
    limits: EngineLimits,
) -> PluginModel:
    """Allocate what the passes of these plans need.

    Raises:
        EngineError: the plans do not fit the configuration or the limits.
        DeviceError: the device has no room.
    """
    wanted = [TARGET] if drafter is None else [TARGET, DRAFTER]
    if missing := sorted(set(wanted) - set(plans)):
        raise EngineError(f"the engine has no plan {missing[0]}; build it again")
    tensors = plans[TARGET].tensors
    own = {} if drafter is None else plans[DRAFTER].tensors
    _check(TARGET, tensors, VERIFY_DTYPES, _verify_shapes(tensors, target, limits), limits.max_batch_size)
    if drafter is not None:
        _check(DRAFTER, own, DRAFT_DTYPES, _draft_shapes(own, drafter, limits), limits.max_batch_size)
    stream = device.create_stream()
    memory = _allocate(device, tensors, limits, stream)
    # Inputs of the one are outputs of the other, whose extents a builder need not know.
    drafted = {**own, **{name: tensors[name] for name in _DRAFTED if name in tensors}}
    width, candidates = (_width(drafted, name) for name in ("draft_logits", "candidates"))
    table_len = own["step_time_us"].shape[0] if own else 1
    arrays = RoundArrays(device, limits, memory, round_work(limits, width, candidates), table_len)
    cache = _cache(device, tensors, limits, limits.max_seq_len, of_drafter=False)
    drafter_cache = None
    if drafter is not None:
        # A block reaches beyond the last token of a request.
        length = limits.max_seq_len + drafter.block_size
        drafter_cache = _cache(device, tensors, limits, length, of_drafter=True)
    caches = [each for each in (cache, drafter_cache) if each is not None]
    scratch = device.allocate(max(plans[name].scratch_bytes for name in wanted))
    a = arrays.memory
    shared = {name: a[name] for name in (*_ROWS, *_DRAFTED, *_TOKENS)}
    verify = shared | {
        "input_ids": a["token_ids"],
        "logit_rows": a["identity"],
        # Every row of a decoding round wants its logits.
        "cu_logits": a["cu_tokens"],
        "logits": a["logits"],
        **{name: a[name] for name in ("out_tokens", "emitted_len", "status")},
    }
    types = VERIFY_DTYPES | {"logits": tensors["logits"].dtype}
    network = Network(device, plans[TARGET], caches, verify, types, scratch)
    draft = None
    if drafter is not None and drafter_cache is not None:
        bound = {name: a[name] for name in DRAFT_DTYPES}
        draft = Network(device, plans[DRAFTER], [drafter_cache], bound, DRAFT_DTYPES, scratch)
    return PluginModel(
        device,
        stream,
        limits,
        memory,
        decode_tokens(tensors),
        network,
        cache,
        drafter_cache,
        draft,
        arrays,
        "confidence" in own,
    )


def _width(tensors: Mapping[str, PlanTensor], name: str) -> int:
    """Return the last extent of a tensor, 0 where there is none."""
    if name not in tensors:
        return 0
    width = tensors[name].shape[-1]
    if width < 1:
        raise EngineError(f"{name} of the drafter's plan has no fixed extent; {_REMEDY}")
    return width


def _cache(
    device: Device, tensors: Mapping[str, PlanTensor], limits: EngineLimits, min_length: int, *, of_drafter: bool
) -> SlotCache:
    """Allocate the caches of the target or of its drafter; the verify plan has both."""
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("past_") and name.startswith("past_drafter.") == of_drafter:
            found[name] = tensor
            if tensor.shape[0] != limits.max_batch_size:
                raise EngineError(
                    f"{name} of the plan holds {tensor.shape[0]} slots, the engine says {limits.max_batch_size}; "
                    f"{_REMEDY}"
                )
    return SlotCache(device, found, limits.max_batch_size, min_length)


def _allocate(device: Device, tensors: Mapping[str, PlanTensor], limits: EngineLimits, stream: int) -> dict[str, int]:
    """Allocate the slots' state, what a prompt's pass reads, and arrays that never change."""
    tokens, logits = most_elements(tensors, "input_ids"), most_elements(tensors, "logit_rows")
    rows = limits.max_batch_size
    arrays: dict[str, tuple[Shape, type]] = {
        **{name: ((rows,), np.int32) for name in SLOT_STATE},
        "unit_rows": ((rows + 1,), np.int32),
        "identity": ((max(logits, rows),), np.int32),
        "no_failures": ((rows,), np.int32),
        "page_table": ((rows, 1), np.int32),
        "prompt_ids": ((tokens,), np.int32),
        "prompt_request": ((tokens,), np.int32),
        "prompt_position": ((tokens,), np.int32),
        "prompt_rows": ((rows + 1,), np.int32),
        "prompt_logit_rows": ((rows,), np.int32),
        "prompt_pages": ((rows, 1), np.int32),
        "prompt_positions": ((rows,), np.int32),
        # Nobody reads them: acceptance is part of the plan.
        "logits": ((logits * limits.vocab_size * ITEM_BYTES[tensors["logits"].dtype],), np.uint8),
    }
    layout = Layout(arrays)
    memory = layout.addresses(device.allocate(layout.num_bytes))
    upload(device, memory["unit_rows"], np.arange(rows + 1, dtype=np.int32), stream)
    upload(device, memory["identity"], np.arange(max(logits, rows), dtype=np.int32), stream)
    upload(device, memory["page_table"], np.arange(rows, dtype=np.int32), stream)
    return memory


def _verify_shapes(tensors: Mapping[str, PlanTensor], target: ModelConfig, limits: EngineLimits) -> dict[str, Shape]:
    """Return the extents that are fixed, -1 elsewhere."""
    gamma = max(1, limits.max_draft_len)
    shapes: dict[str, Shape] = dict.fromkeys((*_TOKENS, "input_ids", "logit_rows", "cu_logits"), (-1,))
    shapes |= dict.fromkeys((*_ROWS, "emitted_len", "status"), (-1,))
    shapes |= {"page_table": (-1, 1), "logits": (-1, target.vocab_size), "out_tokens": (-1, gamma + 1)}
    if limits.has_drafter:
        shapes["draft_tokens"] = (-1, gamma)
    if "draft_logits" in tensors:
        shapes |= {"draft_entries": (-1, gamma), "draft_laws": (-1, gamma, 4), "draft_totals": (-1, gamma)}
    return shapes


def _draft_shapes(tensors: Mapping[str, PlanTensor], drafter: DrafterConfig, limits: EngineLimits) -> dict[str, Shape]:
    gamma = limits.max_draft_len
    shapes: dict[str, Shape] = dict.fromkeys((*_TOKENS, *_ROWS, "token_ids", "anchors", "caps"), (-1,))
    shapes |= dict.fromkeys(("draft_status", "verify_len"), (-1,))
    shapes |= dict.fromkeys(("draft_tokens", "draft_entries", "survival", "draft_totals"), (-1, gamma))
    shapes |= {"page_table": (-1, 1), "draft_laws": (-1, gamma, 4), "limits": (4,), "terms": (3,), "report": (4,)}
    shapes["step_time_us"] = (limits.max_num_tokens + 1,)
    if "draft_logits" in tensors and "candidates" not in tensors:
        shapes["draft_logits"] = (-1, gamma, drafter.draft_vocab_size)
    if drafter.confidence:
        shapes |= {"confidence": (-1, gamma), "inv_temperature": (gamma,), "position_bias": (gamma,)}
    return shapes


def _fits(tensor: PlanTensor, shape: Shape) -> bool:
    """Tell whether a tensor has these extents; a builder need not know those of outputs."""
    if tensor.is_input or len(tensor.shape) != len(shape):
        return tensor.shape == shape
    return all(found in (-1, extent) for found, extent in zip(tensor.shape, shape, strict=True))


def _check(
    plan: str,
    tensors: Mapping[str, PlanTensor],
    known: Mapping[str, str],
    shapes: Mapping[str, Shape],
    num_requests: int,
) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise EngineError(
                f"the {plan}'s plan has no tensor {name!r}: this is no plan of the trt_plugin lowering; {_REMEDY}"
            )
        if not _fits(tensors[name], shape):
            raise EngineError(
                f"{name} of the {plan}'s plan has extents {list(tensors[name].shape)}, the engine says {list(shape)}; "
                f"{_REMEDY}"
            )
    for name in tensors:
        if name not in known and name != "logits" and not name.startswith(("past_", "present_")):
            raise EngineError(f"the {plan}'s plan has a tensor {name!r} this version does not know; {_REMEDY}")
    if "logits" in tensors and tensors["logits"].dtype not in _FLOATS:
        raise EngineError(f"logits of the {plan}'s plan are {tensors['logits'].dtype}, not a float type; {_REMEDY}")
    most = min(high[0] for _, high in tensors["page_table"].ranges)
    if most < num_requests:
        raise EngineError(f"the {plan}'s plan takes {most} requests, the engine says {num_requests}; {_REMEDY}")
