"""Rounds of TensorRT engines' tests, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.recording_device import Op
from trtllm_dspark.engine.rounds import DecodeRows, DeviceSchedule, PromptRows, RoundBatch, RowSampling


def sampling(count: int, *, ban_until: int = 0) -> RowSampling:
    """Greedy rows."""
    return RowSampling(
        temperature=np.zeros(count, np.float32),
        top_k=np.zeros(count, np.int64),
        top_p=np.ones(count, np.float32),
        seed=np.arange(count, dtype=np.uint64),
        ban_until=np.full(count, ban_until, np.int64),
        banned=((1, 2),) * count,
    )


def prompts(count: int, length: int = 3, *, first_slot: int = 0) -> RoundBatch:
    """Prompts of one chunk in slots from `first_slot` on."""
    rows = PromptRows(
        token_ids=np.arange(40, 40 + count * length),
        row_lens=np.full(count, length),
        write_indices=np.zeros(count, np.int64),
        first_slot=first_slot,
        max_new_tokens=np.full(count, 30),
        sampling=sampling(count),
    )
    return RoundBatch(None, rows, "rejection")


def decode(count: int, drafts: int = 5, **options: Any) -> RoundBatch:
    """A decoding round of slots 0 .. count - 1."""
    schedule = DeviceSchedule("fixed", 5, 0.0, 0, count * drafts) if drafts else None
    return RoundBatch(DecodeRows(np.full(count, drafts), sampling(count, **options), schedule), None, "rejection")


def names(ops: list[Op]) -> list[str]:
    """Names of passes and launches, those inside graphs too."""
    flat = [part for op in ops for part in (op.parts or (op,))]
    return [op.name for op in flat if op.kind in ("pass", "launch")]


def run(engine: Any, batches: list[RoundBatch]) -> list[Any]:
    """Run rounds one at a time."""
    return [engine.collect_round(engine.submit_round(batch)) for batch in batches]


def fields(rows: PromptRows | RowSampling) -> dict[str, Any]:
    """Return what makes an equal one."""
    return {name: getattr(rows, name) for name in type(rows).__dataclass_fields__}
