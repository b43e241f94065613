"""Prompt lookup: propose what followed the last tokens when they stood in the text before; no model at all."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from trtllm_dspark.engine.base import Engine, FloatArray, IntArray
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.proposers._lookup import MAX_MATCH, PromptLookup
from trtllm_dspark.runtime.proposers._text import TextProposer
from trtllm_dspark.runtime.proposers._worth import Worth
from trtllm_dspark.runtime.proposers.base import AcceptanceMode, Chunks, Draft
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation.controller import RoundPlan
from trtllm_dspark.speculation.cost_table import CostTable, DraftShape

SAMPLE_TOKENS = 512
"""Length of the text that a lookup is timed on."""


class NgramProposer(TextProposer[PromptLookup]):
    """Look the last tokens up in prompt and output of the same request.

    How likely a draft survives is learned from past rounds, by position and by how many tokens agreed. The drafts are
    certain given the text, so their q is a point mass.

    Args:
        engine: the target; needs no drafter.
        acceptance: how drafts will be accepted; both ways take them.
        timer: counts what lookups take.
        max_draft_len: drafts a round; None = the engine's block, or 7 without one.

    Raises:
        ConfigError: so many drafts do not fit a pass.
    """

    def __init__(
        self, engine: Engine, acceptance: AcceptanceMode, timer: PassTimer, *, max_draft_len: int | None = None
    ) -> None:
        super().__init__(engine, timer, max_draft_len)
        self._worth = Worth(MAX_MATCH + 1, self._draft_len)
        self._matches: IntArray = np.zeros(0, np.int64)

    @property
    def learns_across_requests(self) -> bool:
        """Outcomes of all requests teach what a match is worth."""
        return True

    def costs(self, table: CostTable) -> CostTable:
        """Return the engine's times with that of a lookup, which is measured here."""
        text = PromptLookup(range(SAMPLE_TOKENS))
        started = time.perf_counter()
        for _ in range(100):
            text.propose(self._draft_len)
        per_request = (time.perf_counter() - started) * 1e6 / 100
        counts = {shape.num_requests for shape in table.verify_us}
        return CostTable(table.verify_us, {DraftShape(count, 0): per_request * count for count in sorted(counts)})

    def take_prompts(self, chunks: Chunks, features: FloatArray, *, lazy: bool) -> None:
        """Do nothing: a text is indexed when the first draft is wanted."""

    def catch_up(self, requests: list[ActiveRequest], *, lazy: bool) -> None:
        """Do nothing: texts follow what is committed."""

    def propose(
        self, requests: list[ActiveRequest], plan: RoundPlan, *, num_steps: int, with_confidence: bool, lazy: bool
    ) -> Draft:
        """Look every drafting request up; one without a match drafts nothing."""
        started = self._timer.clock()
        tokens = np.zeros((len(requests), num_steps), np.int64)
        matches = np.zeros(len(requests), np.int64)
        for row in np.flatnonzero(plan.caps).tolist():
            found, matches[row] = self._text(requests[row]).propose(num_steps)
            tokens[row, : len(found)] = found
        caps = np.where(matches > 0, plan.caps, 0)
        self._matches = matches
        confidence = None
        if with_confidence:
            confidence = np.where(matches[:, None] > 0, self._worth.rates(num_steps)[matches], np.float32(0))
        return Draft(
            result=None,
            rows=np.where(caps > 0, np.arange(len(requests)), -1),
            tokens=tokens,
            confidence=confidence,
            caps=caps,
            seconds=self._timer.clock() - started,
        )

    def learn(
        self, requests: Sequence[ActiveRequest], draft: Draft | None, verify_len: IntArray, accepted: IntArray
    ) -> None:
        """Count, by match length and position, drafts whose predecessors were right, and the right ones of them."""
        if draft is None:
            return
        for match, tested, right in zip(self._matches.tolist(), verify_len.tolist(), accepted.tolist(), strict=True):
            if match == 0 or tested == 0 or right < 0:
                continue
            self._worth.count(match, tested, right)

    def committed(self, request: ActiveRequest, tokens: Sequence[int]) -> None:
        """Append to the request's text."""
        if request.speculates:
            self._text(request).extend(tokens)

    def moved(self, request: ActiveRequest, source: int, destination: int) -> None:
        """Do nothing: texts belong to requests, not slots."""

    def _new_text(self, prompt: list[int]) -> PromptLookup:
        return PromptLookup(prompt)
