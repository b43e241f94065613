"""Drafts of the engine's own drafter: one block a request, and the sequential chain over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core
from trtllm_dspark.engine.base import ContextBatch, Engine, FloatArray, IntArray
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.proposers.base import AcceptanceMode, Chunks, Draft
from trtllm_dspark.runtime.sampling import SamplingCache
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation.controller import RoundPlan
from trtllm_dspark.speculation.cost_table import CostTable

MOST_PENDING = 512
"""Tokens whose features wait at once; five layers of 4,096 make 80 KB of one."""
Scalar = TypeVar("Scalar", np.int64, np.float32)


class BlockProposer:
    """DSpark's drafter; without a sequential head it is DFlash.

    Args:
        engine: target and drafter passes.
        acceptance: how its drafts will be accepted.
        timer: counts what passes take.
    """

    def __init__(self, engine: Engine, acceptance: AcceptanceMode, timer: PassTimer) -> None:
        self._engine = engine
        self._acceptance = acceptance
        self._timer = timer
        self._sampling = SamplingCache()

    @property
    def draft_len(self) -> int:
        """Length of the trained block."""
        return self._engine.limits.max_draft_len

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter has a confidence head."""
        return bool(self._engine.heads.has_confidence)

    @property
    def learns_across_requests(self) -> bool:
        """A confidence reads its own request only."""
        return False

    @property
    def needs_features(self) -> bool:
        """Its context is made of them."""
        return True

    def costs(self, table: CostTable) -> CostTable:
        """Return the table as it is: it was measured with this drafter."""
        return table

    def take_prompts(self, chunks: Chunks, features: FloatArray, *, lazy: bool) -> None:
        """Keep the features of prompt chunks; absorb them now unless they may never be needed."""
        start = 0
        for chunk in chunks:
            if chunk.request.speculates:
                chunk.request.features.append(features[start : start + chunk.length])
            start += chunk.length
        requests = [chunk.request for chunk in chunks]
        if lazy:
            self.catch_up(requests, lazy=True)
        else:
            self._absorb_pending(requests, [True] * len(requests))

    def catch_up(self, requests: list[ActiveRequest], *, lazy: bool) -> None:
        """Absorb what plain rounds leave behind, if lazy once a good deal has gathered.

        Nothing reads the context meanwhile, one pass over many tokens costs less than many over one, and a request
        that ends before anything is drafted for it is never charged. What waits lies in the host's memory, so all
        requests together keep no more than `MOST_PENDING` tokens waiting.
        """
        overdue = self._overdue(requests, lazy=lazy)
        if any(overdue):
            self._absorb_pending(requests, overdue)

    def _overdue(self, requests: list[ActiveRequest], *, lazy: bool) -> list[bool]:
        """Return which requests must not wait any longer."""
        pending = [request.num_pending for request in requests]
        if not lazy or sum(pending) >= MOST_PENDING:
            return [count > 0 for count in pending]
        self._own_features(requests)
        return [count >= self._engine.limits.max_num_tokens for count in pending]

    def _own_features(self, requests: list[ActiveRequest]) -> None:
        """Let go of the pass a request's newest features are a view of: it holds every mate's rows too."""
        for request in requests:
            if request.features and request.features[-1].base is not None:
                request.features[-1] = request.features[-1].copy()

    def propose(
        self, requests: list[ActiveRequest], plan: RoundPlan, *, num_steps: int, with_confidence: bool, lazy: bool
    ) -> Draft:
        """Let the drafter's context catch up with the target's cache, then draft one block a request."""
        started = self._timer.clock()
        wanted = (plan.caps > 0).tolist()
        # Those that do not draft keep up as in a plain round.
        resting = [request for request, want in zip(requests, wanted, strict=True) if not want]
        overdue = iter(self._overdue(resting, lazy=lazy))
        self._absorb_pending(requests, [want or next(overdue) for want in wanted])
        # One pass covers contiguous slots: a request inside the span that does not draft rides along unread.
        drafting = np.flatnonzero(plan.caps).tolist()
        first, last = drafting[0], drafting[-1] + 1
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
            tokens=_padded(tokens, first, len(requests)),
            confidence=None if confidence is None else _padded(confidence, first, len(requests)),
            caps=caps,
            seconds=self._timer.clock() - started,
        )

    def learn(
        self, requests: Sequence[ActiveRequest], draft: Draft | None, verify_len: IntArray, accepted: IntArray
    ) -> None:
        """Learn nothing: the controller does."""

    def committed(self, request: ActiveRequest, tokens: Sequence[int]) -> None:
        """Do nothing: features of the tokens come with the round that cached them."""

    def moved(self, request: ActiveRequest, source: int, destination: int) -> None:
        """Do nothing: the engine copies the drafter's context with the target's cache."""

    def forget(self, request: ActiveRequest) -> None:
        """Do nothing: everything is kept with the request."""

    def close(self) -> None:
        """Do nothing: the engine owns the drafter."""

    def _absorb_pending(self, requests: list[ActiveRequest], wanted: list[bool]) -> None:
        """Absorb everything the wanted ones of these requests have pending, in as few passes as the engine takes.

        Args:
            requests: owners of neighbouring slots, in their order.
            wanted: one a request.
        """
        most = self._engine.limits.max_num_tokens
        lengths = [request.num_pending if want else 0 for request, want in zip(requests, wanted, strict=True)]
        rows = [row for row, length in enumerate(lengths) if length]
        while rows:
            taken, room = 0, most
            while taken < len(rows) and lengths[rows[taken]] <= room:
                room -= lengths[rows[taken]]
                taken += 1
            first, last = rows[0], rows[max(taken, 1) - 1] + 1
            self._absorb(requests[first:last], lengths[first:last])
            rows = rows[max(taken, 1) :]

    def _absorb(self, requests: list[ActiveRequest], lengths: list[int]) -> None:
        """Absorb all or nothing of each request; more than a pass takes only of one alone."""
        parts = [part for request, length in zip(requests, lengths, strict=True) if length for part in request.features]
        features = parts[0] if len(parts) == 1 else np.concatenate(parts)
        starts = np.array([request.num_context for request in requests], np.int64)
        step = self._engine.limits.max_num_tokens
        for first in range(0, len(features), step):
            rows = features[first : first + step]
            taken = np.array(lengths if len(features) <= step else [len(rows)], np.int64)
            batch = ContextBatch(rows, taken, starts + first, requests[0].slot)
            self._timer.on_engine(self._engine.absorb, batch)
        for request, length in zip(requests, lengths, strict=True):
            if length:
                request.num_context += length
                request.features.clear()


def _padded(span: NDArray[Scalar], first: int, num_rows: int) -> NDArray[Scalar]:
    """Return [num_rows, n] with `span` from row `first` on and zeros around it."""
    if len(span) == num_rows:
        return span
    padded = np.zeros((num_rows, span.shape[1]), span.dtype)
    padded[first : first + len(span)] = span
    return padded
