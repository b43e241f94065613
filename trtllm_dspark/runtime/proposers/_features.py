"""What proposers of the engine's own drafter have in common: its context follows the target's committed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import Engine, FloatArray, IntArray
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.proposers.base import AcceptanceMode, Chunks, Draft
from trtllm_dspark.runtime.sampling import SamplingCache
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation.controller import RoundPlan

MAX_PENDING_BYTES = 64 << 20
"""Host memory in which features wait: of 5,800 tokens at five layers of 576, of 800 at five of 4,096."""
Scalar = TypeVar("Scalar", np.int64, np.float32)


class FeatureProposer:
    """Let the drafter's context absorb the features of committed tokens, in few passes and no sooner than needed.

    Args:
        engine: target and drafter passes.
        acceptance: how drafts will be accepted.
        timer: counts what passes take.
    """

    def __init__(self, engine: Engine, acceptance: AcceptanceMode, timer: PassTimer) -> None:
        self._engine = engine
        self._acceptance = acceptance
        self._timer = timer
        self._sampling = SamplingCache()
        self._most_pending = MAX_PENDING_BYTES // (4 * engine.limits.feature_size)

    @property
    def draft_len(self) -> int:
        """Length of the trained block."""
        return self._engine.limits.max_draft_len

    @property
    def learns_across_requests(self) -> bool:
        """A confidence reads its own request only."""
        return False

    @property
    def needs_features(self) -> bool:
        """Its context is made of them."""
        return True

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
        that ends before anything is drafted for it is never charged. What waits lies in the host's memory: where that
        of all requests exceeds `MAX_PENDING_BYTES`, those with the most are absorbed until half of it is left.
        """
        overdue = self._overdue(requests, lazy=lazy)
        if any(overdue):
            self._absorb_pending(requests, overdue)

    def _overdue(self, requests: list[ActiveRequest], *, lazy: bool) -> list[bool]:
        """Return which requests must not wait any longer."""
        ready = [self._ready(request) for request in requests]
        if not lazy:
            return [count > 0 for count in ready]
        self._own_features(requests)
        most = self._most_pending
        overdue = [count >= self._engine.limits.max_num_tokens for count in ready]
        left = sum([count for count, over in zip(ready, overdue, strict=True) if not over])
        if left > most:
            for place in sorted(range(len(ready)), key=lambda place: -ready[place]):
                if left <= most // 2:
                    break
                left -= 0 if overdue[place] else ready[place]
                overdue[place] = True
        return overdue

    def _own_features(self, requests: list[ActiveRequest]) -> None:
        """Let go of the pass a request's newest features are a view of: it holds every mate's rows too."""
        for request in requests:
            if request.features and request.features[-1].base is not None:
                request.features[-1] = request.features[-1].copy()

    def _absorb_for(self, requests: list[ActiveRequest], plan: RoundPlan, *, lazy: bool) -> tuple[int, int]:
        """Absorb what the drafting requests have pending; return the first and behind the last of them.

        Those that do not draft keep up as in a plain round.
        """
        self._absorb_pending(requests, self._due(requests, plan, lazy=lazy))
        drafting = np.flatnonzero(plan.caps).tolist()
        return drafting[0], drafting[-1] + 1

    def _absorb_backlog(self, requests: list[ActiveRequest], plan: RoundPlan, *, lazy: bool) -> None:
        """Absorb what more than a round has left pending: prompts, what a bypass put off, what gathered while resting.

        Paid once in many rounds, it is no part of what a draft takes and must not be timed as one.
        """
        due = self._due(requests, plan, lazy=lazy)
        behind = [now and self._ready(row) > self.draft_len + 1 for row, now in zip(requests, due, strict=True)]
        if any(behind):
            self._absorb_pending(requests, behind)

    def _due(self, requests: list[ActiveRequest], plan: RoundPlan, *, lazy: bool) -> list[bool]:
        """Return which requests draft, or rest and must not wait any longer."""
        wanted = (plan.caps > 0).tolist()
        resting = [request for request, want in zip(requests, wanted, strict=True) if not want]
        overdue = iter(self._overdue(resting, lazy=lazy))
        return [want or next(overdue) for want in wanted]

    def learn(
        self, requests: Sequence[ActiveRequest], draft: Draft | None, verify_len: IntArray, accepted: IntArray
    ) -> None:
        """Learn nothing: the controller does."""

    def moved(self, request: ActiveRequest, source: int, destination: int) -> None:
        """Do nothing: the engine copies the drafter's context with the target's cache."""

    def close(self) -> None:
        """Do nothing: the engine owns the drafter."""

    def _absorb_pending(self, requests: list[ActiveRequest], wanted: list[bool]) -> None:
        """Absorb everything the wanted ones of these requests have pending, in as few passes as the engine takes.

        Args:
            requests: owners of neighbouring slots, in their order.
            wanted: one a request.
        """
        most = self._engine.limits.max_num_tokens
        lengths = [self._ready(request) if want else 0 for request, want in zip(requests, wanted, strict=True)]
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
        """Absorb all or nothing of what is ready of each request; more than a pass takes only of one alone."""
        parts = [part for request, length in zip(requests, lengths, strict=True) for part in _take(request, length)]
        features = parts[0] if len(parts) == 1 else np.concatenate(parts)
        starts = np.array([request.num_context for request in requests], np.int64)
        step = self._engine.limits.max_num_tokens
        for first in range(0, len(features), step):
            rows = features[first : first + step]
            taken = np.array(lengths if len(features) <= step else [len(rows)], np.int64)
            self._run(requests, rows, taken, starts + first)
        for request, length in zip(requests, lengths, strict=True):
            request.num_context += length

    def _ready(self, request: ActiveRequest) -> int:
        """Return how many of its pending features can be absorbed now."""
        return request.num_pending

    def _run(self, requests: list[ActiveRequest], features: FloatArray, row_lens: IntArray, starts: IntArray) -> None:
        """Absorb one pass.

        Args:
            requests: owners of neighbouring slots.
            features: [T, m * d] of all of them, packed.
            row_lens: [R] int64, rows may be 0.
            starts: [R] int64, features absorbed before.
        """
        raise NotImplementedError


def _take(request: ActiveRequest, length: int) -> list[FloatArray]:
    """Remove the first `length` pending features of a request and return them."""
    parts: list[FloatArray] = []
    while length:
        part = request.features.pop(0)
        if len(part) > length:
            # A copy, so that what stays does not keep the whole pass alive.
            request.features.insert(0, part[length:].copy())
            part = part[:length]
        parts.append(part)
        length -= len(part)
    return parts


def padded(span: NDArray[Scalar], first: int, num_rows: int) -> NDArray[Scalar]:
    """Return [num_rows, n] with `span` from row `first` on and zeros around it."""
    if len(span) == num_rows:
        return span
    padded = np.zeros((num_rows, span.shape[1]), span.dtype)
    padded[first : first + len(span)] = span
    return padded
