"""Drafts of the engine's own block drafter: one block a request, and the sequential chain over it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import ContextBatch, FloatArray, IntArray
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.proposers._features import FeatureProposer, padded
from trtllm_dspark.runtime.proposers.base import Draft
from trtllm_dspark.speculation.controller import RoundPlan
from trtllm_dspark.speculation.cost_table import CostTable


class BlockProposer(FeatureProposer):
    """DSpark's drafter; without a sequential head it is DFlash."""

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter has a confidence head."""
        return bool(self._engine.heads.has_confidence)

    def costs(self, table: CostTable) -> CostTable:
        """Return the table as it is: it was measured with this drafter."""
        return table

    def propose(
        self, requests: list[ActiveRequest], plan: RoundPlan, *, num_steps: int, with_confidence: bool, lazy: bool
    ) -> Draft:
        """Let the drafter's context catch up with the target's cache, then draft one block a request."""
        self._absorb_backlog(requests, plan, lazy=lazy)
        started = self._timer.clock()
        first, last = self._absorb_for(requests, plan, lazy=lazy)
        # One pass covers contiguous slots: a request inside the span that does not draft rides along unread.
        span = requests[first:last]
        anchors = np.array([request.anchor for request in span], np.int64)
        # A request that rides along may have less context than tokens: its block reads and decides nothing.
        positions = np.array([request.num_context for request in span], np.int64)
        block = self._timer.on_engine(self._engine.draft_block, anchors, positions, first_slot=first)
        self._timer.stats.draft_passes += 1
        result = self._timer.in_core(
            _core.draft_chain,
            self._engine.heads,
            block.base_logits,
            anchors,
            positions,
            self._sampling.get(span),
            hidden=block.hidden,
            acceptance=self._acceptance,
            num_steps=num_steps,
        )
        tokens = result.tokens
        confidence = None
        if with_confidence:
            confidence = self._timer.in_core(
                _core.confidence,
                self._engine.heads,
                block.hidden,
                anchors,
                tokens,
                temperature=plan.temperature,
                bias=plan.bias,
            )
        status = result.status.tolist()
        caps = plan.caps.copy()
        for row in range(first, last):
            if status[row - first] != _core.STATUS_OK:
                caps[row] = 0
        rows = [row - first if cap > 0 else -1 for row, cap in enumerate(plan.caps.tolist())]
        return Draft(
            result=result,
            rows=np.array(rows, np.int64),
            tokens=padded(tokens, first, len(requests)),
            confidence=None if confidence is None else padded(confidence, first, len(requests)),
            caps=caps,
            seconds=self._timer.clock() - started,
        )

    def committed(self, request: ActiveRequest, tokens: Sequence[int]) -> None:
        """Do nothing: features of the tokens come with the round that cached them."""

    def forget(self, request: ActiveRequest) -> None:
        """Do nothing: everything is kept with the request."""

    def _run(self, requests: list[ActiveRequest], features: FloatArray, row_lens: IntArray, starts: IntArray) -> None:
        batch = ContextBatch(features, row_lens, starts, requests[0].slot)
        self._timer.on_engine(self._engine.absorb, batch)
