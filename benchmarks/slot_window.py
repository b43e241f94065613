"""Part of an engine's slots as an engine of its own: sessions that take turns on one engine keep their caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtllm_dspark.engine.base import (
    BlockOutput,
    ContextBatch,
    Engine,
    EngineLimits,
    IntArray,
    TargetOutput,
    TokenBatch,
)


class SlotWindow:
    """An engine over slots `first` to `first + count - 1` of another, which whoever made it closes.

    Args:
        engine: one without an autoregressive drafter.
        first: slot that is this engine's slot 0.
        count: its slots.
    """

    def __init__(self, engine: Engine, first: int, count: int) -> None:
        if first + count > engine.limits.max_batch_size:
            raise ValueError(f"slots {first} to {first + count - 1} of an engine with {engine.limits.max_batch_size}")
        if engine.limits.autoregressive:
            raise ValueError("an autoregressive drafter keeps slots of its own; load the engine twice")
        self._engine, self._first = engine, first
        self._limits = replace(engine.limits, max_batch_size=count)

    @property
    def limits(self) -> EngineLimits:
        """Those of the whole engine, with this window's slots."""
        return self._limits

    @property
    def heads(self) -> Any:
        """See Engine."""
        return self._engine.heads

    def verify(self, batch: TokenBatch) -> TargetOutput:
        """See Engine."""
        return self._engine.verify(replace(batch, first_slot=self._first + batch.first_slot))

    def absorb(self, batch: ContextBatch) -> None:
        """See Engine."""
        self._engine.absorb(replace(batch, first_slot=self._first + batch.first_slot))

    def draft_block(self, anchors: IntArray, positions: IntArray, *, first_slot: int = 0) -> BlockOutput:
        """See Engine."""
        return self._engine.draft_block(anchors, positions, first_slot=self._first + first_slot)

    def copy_slot(self, source: int, destination: int, *, num_tokens: int, num_context: int) -> None:
        """See Engine."""
        self._engine.copy_slot(
            self._first + source, self._first + destination, num_tokens=num_tokens, num_context=num_context
        )

    def close(self) -> None:
        """Leave the engine to the others."""
