"""The engine's block drafter, and prompt lookup where the text repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trtllm_dspark.engine.base import Engine
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.proposers._lookup import MAX_MATCH, PromptLookup
from trtllm_dspark.runtime.proposers._worth import Worth
from trtllm_dspark.runtime.proposers.base import AcceptanceMode, Draft
from trtllm_dspark.runtime.proposers.block import BlockProposer
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation.controller import RoundPlan

BLOCK = 0
"""Kind of the drafter's own blocks in `Worth`; kind m > 0 is a lookup in which m tokens agreed."""


class EngineNgramProposer(BlockProposer):
    """Each round, for each request, whichever has been worth more drafts: a lookup that agrees this far, or the block.

    What both are worth is learned from emitted tokens: a lookup's proposal is compared with them whether it was used or
    not, which costs nothing, a block's where one was drafted. A round in which every request has its lookup skips the
    drafter's pass; its context catches up before the next block.

    A lookup's drafts are certain given the text (q is a point mass), so acceptance stays exact (docs/losslessness.md).

    Args:
        engine: an engine with a block drafter.
        acceptance: how drafts will be accepted.
        timer: counts what passes take.

    Raises:
        ConfigError: the engine has no block drafter.
    """

    def __init__(self, engine: Engine, acceptance: AcceptanceMode, timer: PassTimer) -> None:
        if not engine.limits.has_drafter or engine.limits.autoregressive:
            raise ConfigError(
                "drafter 'engine+ngram' needs an engine with a block drafter (dspark or dflash); use 'ngram', or build "
                "one with --draft_checkpoint"
            )
        super().__init__(engine, acceptance, timer)
        self._texts: dict[ActiveRequest, PromptLookup] = {}
        self._proposed: dict[ActiveRequest, list[tuple[int, list[int]]]] = {}
        self._worth = Worth(MAX_MATCH + 1, self.draft_len)

    @property
    def learns_across_requests(self) -> bool:
        """Outcomes of all requests teach what a match is worth."""
        return True

    def propose(
        self, requests: list[ActiveRequest], plan: RoundPlan, *, num_steps: int, with_confidence: bool, lazy: bool
    ) -> Draft:
        """Look every drafting request up, then draft blocks for those whose lookup promises less."""
        started = self._timer.clock()
        drafting = np.flatnonzero(plan.caps).tolist()
        tokens = np.zeros((len(requests), num_steps), np.int64)
        matches = np.zeros(len(requests), np.int64)
        worth = self._worth.accepted(num_steps)
        for row in drafting:
            found, match = self._text(requests[row]).propose(num_steps)
            if match == 0:
                continue
            self._proposed.setdefault(requests[row], []).append((match, found))
            if worth[match] >= worth[BLOCK]:
                tokens[row], matches[row] = found, match
        looked_up = matches > 0
        rates = self._worth.rates(num_steps)[matches] if with_confidence else None
        if np.array_equal(looked_up, plan.caps > 0):
            # Before the drafter's context catches up, which is paid once in many rounds: no lookup takes that long.
            seconds = self._timer.clock() - started
            # Nothing reads the context: what is left behind waits as in a plain round.
            self.catch_up(requests, lazy=True)
            return Draft(None, np.where(looked_up, 0, -1), tokens, rates, plan.caps.copy(), seconds)
        lookup_s = self._timer.clock() - started
        rest = plan._replace(caps=np.where(looked_up, 0, plan.caps))
        draft = super().propose(requests, rest, num_steps=num_steps, with_confidence=with_confidence, lazy=lazy)
        for row in np.flatnonzero(rest.caps).tolist():
            self._proposed.setdefault(requests[row], []).append((BLOCK, draft.tokens[row].tolist()))
        if not looked_up.any():
            return replace(draft, seconds=draft.seconds + lookup_s)
        confidence = draft.confidence
        if confidence is not None and rates is not None:
            confidence = np.where(looked_up[:, None], rates, confidence)
        return Draft(
            result=draft.result,
            rows=np.where(looked_up, 0, draft.rows),
            tokens=np.where(looked_up[:, None], tokens, draft.tokens),
            confidence=confidence,
            caps=np.where(looked_up, plan.caps, draft.caps),
            seconds=draft.seconds + lookup_s,
            certain=looked_up,
        )

    def committed(self, request: ActiveRequest, tokens: Sequence[int]) -> None:
        """Append to the request's text, and compare with what was proposed."""
        for kind, drafts in self._proposed.pop(request, ()):
            self._worth.compare(kind, drafts, tokens)
        if request.speculates:
            self._text(request).extend(tokens)

    def forget(self, request: ActiveRequest) -> None:
        """Drop the request's text."""
        self._texts.pop(request, None)
        self._proposed.pop(request, None)

    def _text(self, request: ActiveRequest) -> PromptLookup:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = PromptLookup(request.prompt.tolist())
        return text
