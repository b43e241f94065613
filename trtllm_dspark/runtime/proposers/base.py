"""What proposes drafts: one interface for a drafter inside the engine, a lookup in the text, another model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core
from trtllm_dspark.engine.base import Engine, FloatArray, IntArray
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.batcher import PromptChunk
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation.controller import RoundPlan
from trtllm_dspark.speculation.cost_table import CostTable

AcceptanceMode = Literal["rejection", "coupled"]
Chunks = Sequence[PromptChunk[ActiveRequest]]


@dataclass(slots=True)
class Draft:
    """Drafts of one round.

    Attributes:
        result: what the core drafted for the span of decoding requests that draft; None for drafts that are certain
            given what stands before them (a lookup, another model's likeliest tokens): their q is a point mass.
        rows: [R] int64, row in `result` of each decoding request, -1 for one that does not draft; of one whose drafts
            are certain any other number.
        tokens: [R, draft_len] int64; rows outside the span are 0, a row the core refused is -1.
        confidence: [R, draft_len] float32, or None where the schedule needs none.
        caps: [R] int64, most drafts to verify.
        seconds: what catching up and drafting took.
        certain: [R] which requests' drafts are certain though there is a `result` for others; None = none.
    """

    result: _core.Draft | None
    rows: IntArray
    tokens: IntArray
    confidence: FloatArray | None
    caps: IntArray
    seconds: float
    certain: NDArray[np.bool_] | None = None

    @property
    def num_steps(self) -> int:
        """Drafts proposed for each request that drafts."""
        return int(self.tokens.shape[1])


class Proposer(Protocol):
    """Propose drafts for decoding requests.

    Whatever a proposal looks at was emitted before the round began: drafts of a round depend on past rounds, and
    draft k on drafts before k, so that every schedule stays lossless (docs/losslessness.md).
    """

    @property
    def draft_len(self) -> int:
        """Drafts of one request proposed in a round at most."""
        ...

    @property
    def has_confidence(self) -> bool:
        """Whether it can say how likely its drafts are accepted."""
        ...

    @property
    def learns_across_requests(self) -> bool:
        """Whether outcomes of one request move the confidences of another (see `StreamKeys`)."""
        ...

    @property
    def needs_features(self) -> bool:
        """Whether it reads the target's features of committed tokens (`ActiveRequest.features`)."""
        ...

    def costs(self, table: CostTable) -> CostTable:
        """Return the engine's times with those of this proposer's drafts; the engine is idle meanwhile."""
        ...

    def take_prompts(self, chunks: Chunks, features: FloatArray, *, lazy: bool) -> None:
        """Learn of prompt chunks that the target has just cached, and of their features [T, m * d].

        Args:
            chunks: in slot order.
            features: packed like the chunks.
            lazy: whether work may be put off because it may never be needed.
        """
        ...

    def catch_up(self, requests: list[ActiveRequest], *, lazy: bool) -> None:
        """Do what a round without drafts must not leave undone."""
        ...

    def propose(
        self, requests: list[ActiveRequest], plan: RoundPlan, *, num_steps: int, with_confidence: bool, lazy: bool
    ) -> Draft:
        """Return drafts of the requests whose cap in `plan` is above 0; there is at least one.

        Args:
            requests: decoding requests in slot order.
            plan: of the round; its calibration is applied to the confidences.
            num_steps: drafts of a request, at most `draft_len`.
            with_confidence: whether confidences are wanted.
            lazy: whether requests that do not draft may stay behind.
        """
        ...

    def learn(
        self, requests: Sequence[ActiveRequest], draft: Draft | None, verify_len: IntArray, accepted: IntArray
    ) -> None:
        """Learn what became of a round: [R] drafts verified and [R] accepted, -1 for a request that failed."""
        ...

    def committed(self, request: ActiveRequest, tokens: Sequence[int]) -> None:
        """Learn of tokens a request has emitted and goes on after."""
        ...

    def moved(self, request: ActiveRequest, source: int, destination: int) -> None:
        """Follow a request to another slot."""
        ...

    def forget(self, request: ActiveRequest) -> None:
        """Drop what is kept about a request that has ended."""
        ...

    def close(self) -> None:
        """Release what the proposer owns besides the target's engine."""
        ...


ProposerFactory = Callable[[Engine, AcceptanceMode, PassTimer], Proposer]
"""Makes a session's proposer from its engine, its acceptance mode and its timer."""
