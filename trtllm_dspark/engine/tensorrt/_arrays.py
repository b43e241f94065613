"""Arrays of rounds: what the host writes for each, what it reads, and what never leaves the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.tensorrt._memory import Layout
from trtllm_dspark.engine.tensorrt.device import Device

MAX_BANNED = 16
"""Most end tokens of a request that has a `min_tokens`."""
FIXED_MODE, STALE_TOPK_MODE = 0, 3
SCHEDULE_MODES = {"fixed": FIXED_MODE, "threshold": 1, "early_stop": 2, "stale_topk": STALE_TOPK_MODE}
ACCEPTANCES = {"greedy": 0, "rejection": 1, "coupled": 2}


class RoundArrays:
    """The arrays of an engine's rounds, allocated.

    Args:
        device: where they lie.
        limits: of the engine.
        model_memory: address of every array of the model.
        work: what lives on the device only.
        table_len: entries of `step_time_us`.

    Attributes:
        inputs: what the host writes for each decoding round: one copy.
        outputs: what it reads of each: one copy.
        prompt_inputs: what it writes for the first tokens of prompts.
        prompt_outputs: what it reads of them.
        memory: address of every array of a decoding round.
        prompt_memory: the same where prompts' first tokens are chosen.
    """

    def __init__(
        self, device: Device, limits: EngineLimits, model_memory: Mapping[str, int], work: Layout, table_len: int
    ) -> None:
        rows, gamma = limits.max_batch_size, max(1, limits.max_draft_len)
        self.inputs = round_inputs(limits, table_len)
        self.outputs = round_outputs(limits)
        self.prompt_inputs = Layout({"active": ((1,), np.int32), **_sampling(rows)})
        self.prompt_outputs = Layout(_emitted(rows, gamma))
        layouts = (self.inputs, self.outputs, self.prompt_inputs, self.prompt_outputs)
        self._base = {layout: device.allocate(layout.num_bytes) for layout in layouts}
        self.memory = dict(model_memory) | work.addresses(device.allocate(work.num_bytes))
        for layout in (self.inputs, self.outputs):
            self.memory |= layout.addresses(self.base(layout))
        self.prompt_memory = dict(self.memory)
        for layout in (self.prompt_inputs, self.prompt_outputs):
            self.prompt_memory |= layout.addresses(self.base(layout))

    def base(self, layout: Layout) -> int:
        """Return where the arrays of one of the four layouts begin."""
        return self._base[layout]


def round_inputs(limits: EngineLimits, table_len: int) -> Layout:
    """Return what the host writes for each round."""
    rows, gamma = limits.max_batch_size, max(1, limits.max_draft_len)
    return Layout(
        {
            "active": ((1,), np.int32),
            "limits": ((4,), np.int32),
            "terms": ((3,), np.float32),
            "max_drafts": ((rows,), np.int32),
            "thresholds": ((rows,), np.float32),
            **_sampling(rows),
            "inv_temperature": ((gamma,), np.float32),
            "position_bias": ((gamma,), np.float32),
            "step_time_us": ((table_len,), np.float32),
        }
    )


def _sampling(rows: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Return the arrays of `RowSampling` as kernels and plugins read them."""
    return {
        "temperature": ((rows,), np.float32),
        "top_k": ((rows,), np.int32),
        "top_p": ((rows,), np.float32),
        "seed": ((rows,), np.int64),
        "ban_until": ((rows,), np.int32),
        "banned": ((rows, MAX_BANNED), np.int32),
    }


def _emitted(rows: int, gamma: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Return the results of acceptance."""
    return {
        "out_tokens": ((rows, gamma + 1), np.int32),
        "emitted_len": ((rows,), np.int32),
        "status": ((rows,), np.int32),
    }


def round_outputs(limits: EngineLimits) -> Layout:
    """Return what the host reads of each round."""
    rows, gamma = limits.max_batch_size, max(1, limits.max_draft_len)
    return Layout(
        {
            **_emitted(rows, gamma),
            "verify_len": ((rows,), np.int32),
            "draft_status": ((rows,), np.int32),
            "confidence": ((rows, gamma), np.float32),
            "report": ((4,), np.int32),
        }
    )


def round_work(limits: EngineLimits, draft_width: int, num_candidates: int = 0) -> Layout:
    """Return what lives on the device only.

    Args:
        limits: of the engine.
        draft_width: logits kept of a draft, Vd or the candidates; 0 without a drafter.
        num_candidates: ids kept of a draft.
    """
    rows, gamma = limits.max_batch_size, max(1, limits.max_draft_len)
    tokens = rows * (gamma + 1)
    return Layout(
        {
            "caps": ((rows,), np.int32),
            "live": ((rows,), np.int32),
            "cu_tokens": ((rows + 1,), np.int32),
            "token_ids": ((tokens,), np.int32),
            "token_request": ((tokens,), np.int32),
            "token_position": ((tokens,), np.int32),
            "survival": ((rows, gamma), np.int32),
            "draft_tokens": ((rows, gamma), np.int32),
            "draft_entries": ((rows, gamma), np.int32),
            "draft_laws": ((rows, gamma, 4), np.float32),
            "draft_totals": ((rows, gamma), np.int64),
            "draft_logits": ((rows, gamma, draft_width), np.float32),
            "candidates": ((rows, gamma, num_candidates), np.int32),
        }
    )
