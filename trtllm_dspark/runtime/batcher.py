"""Admission: which prompts are prefilled this round, and how much room is left for drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Prompted(Protocol):
    """What admission needs to know of a request."""

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        ...

    num_cached: int


R = TypeVar("R", bound=Prompted)


@dataclass(frozen=True, slots=True)
class PromptChunk(Generic[R]):
    """Prompt tokens [start, start + length) of one request, prefilled in this round."""

    request: R
    start: int
    length: int

    @property
    def completes(self) -> bool:
        """Whether the prompt is wholly cached after it."""
        return self.start + self.length == self.request.num_prompt


@dataclass(frozen=True, slots=True)
class RoundPlan(Generic[R]):
    """What a round does besides decoding.

    Attributes:
        chunks: prompt chunks in slot order; only the last may leave its prompt unfinished.
        admitted: requests among them that need a slot.
        draft_budget: draft tokens that fit into the round beside anchors and chunks.
    """

    chunks: tuple[PromptChunk[R], ...]
    admitted: tuple[R, ...]
    draft_budget: int


class Batcher(Generic[R]):
    """First come, first served admission under one token budget a round.

    Args:
        max_num_tokens: tokens of a round over all requests: anchors, drafts and prompt chunks.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._waiting: deque[R] = deque()

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[R]:
        """Iterate over waiting requests in order."""
        return iter(self._waiting)

    def add(self, request: R) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def discard(self, request: R) -> None:
        """Forget a waiting request."""
        self._waiting.remove(request)

    def plan(self, *, num_decoding: int, drafts_wanted: int, prefilling: Sequence[R], num_free: int) -> RoundPlan[R]:
        """Plan a round and take the admitted requests from the queue.

        Drafts get the room they want as long as prompts keep half of what the anchors leave: prompts always advance,
        and a long prompt never stops decoding.

        Args:
            num_decoding: decoding requests; each has one anchor in the round.
            drafts_wanted: draft tokens they could verify at most.
            prefilling: requests with an unfinished prompt, in slot order.
            num_free: free slots.
        """
        room = self._max_num_tokens - num_decoding
        if not prefilling and not (self._waiting and num_free):
            return RoundPlan((), (), room)
        left = max(room - drafts_wanted, (room + 1) // 2)
        chunks: list[PromptChunk[R]] = []
        admitted: list[R] = []
        for request in prefilling:
            left = _take(request, left, chunks)
        while left > 0 and self._waiting and len(admitted) < num_free:
            admitted.append(self._waiting.popleft())
            left = _take(admitted[-1], left, chunks)
        return RoundPlan(tuple(chunks), tuple(admitted), room - sum(chunk.length for chunk in chunks))


def _take(request: R, left: int, chunks: list[PromptChunk[R]]) -> int:
    length = min(left, request.num_prompt - request.num_cached)
    if length:
        chunks.append(PromptChunk(request, request.num_cached, length))
    return left - length
