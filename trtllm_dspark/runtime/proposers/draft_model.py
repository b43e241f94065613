"""Another, smaller target with the same vocabulary as the drafter: one pass of it for every draft token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trtllm_dspark.engine.base import Engine, FloatArray, IntArray, TokenBatch
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.proposers._draft_times import with_draft_times
from trtllm_dspark.runtime.proposers._text import TextProposer
from trtllm_dspark.runtime.proposers.base import AcceptanceMode, Chunks, Draft
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation.controller import RoundPlan
from trtllm_dspark.speculation.cost_table import CostTable


@dataclass(slots=True)
class _Text:
    """A request's tokens, and how many of them the draft model has cached in its slot."""

    tokens: list[int]
    num_cached: int = 0
    proposed: list[int] = field(default_factory=list)


class DraftModelProposer(TextProposer[_Text]):
    """Draft the likeliest tokens of another model, one after the other.

    Drafts are argmaxes at every temperature: certain given the text, so their q is a point mass and one probability of
    the draft model, that of the token it chose, is the confidence.

    Args:
        draft_engine: the small model; owned by the proposer from here on.
        engine: the target.
        acceptance: how drafts will be accepted; both ways take them.
        timer: counts what passes take.
        max_draft_len: drafts a round; None = the engine's block, or 7 without one.

    Raises:
        ConfigError: the two engines do not fit each other.
    """

    def __init__(
        self,
        draft_engine: Engine,
        engine: Engine,
        acceptance: AcceptanceMode,
        timer: PassTimer,
        *,
        max_draft_len: int | None = None,
    ) -> None:
        super().__init__(engine, timer, max_draft_len)
        own, limits = draft_engine.limits, engine.limits
        if own.vocab_size != limits.vocab_size:
            raise ConfigError(
                f"the draft model has a vocabulary of {own.vocab_size} tokens and the target one of "
                f"{limits.vocab_size}; take a draft model with the target's tokenizer"
            )
        for name in ("max_batch_size", "max_seq_len"):
            if getattr(own, name) < getattr(limits, name):
                raise ConfigError(
                    f"the draft model's engine has --{name} {getattr(own, name)} and the target's "
                    f"{getattr(limits, name)}; build it with at least as much"
                )
        self._engine = draft_engine

    @property
    def learns_across_requests(self) -> bool:
        """A confidence reads its own request only."""
        return False

    def costs(self, table: CostTable) -> CostTable:
        """Return the target's times with those of this model's drafts, which are measured here."""
        return with_draft_times(table, self._rehearse)

    def take_prompts(self, chunks: Chunks, features: FloatArray, *, lazy: bool) -> None:
        """Cache the prompt chunks too, unless they may never be needed."""
        if lazy:
            return
        self._cache([chunk.request for chunk in chunks], [chunk.start + chunk.length for chunk in chunks])

    def catch_up(self, requests: list[ActiveRequest], *, lazy: bool) -> None:
        """Cache what was committed, unless it may wait until drafts are wanted."""
        if not lazy:
            self._cache(requests, [len(self._text(request).tokens) - 1 for request in requests])

    def propose(
        self, requests: list[ActiveRequest], plan: RoundPlan, *, num_steps: int, with_confidence: bool, lazy: bool
    ) -> Draft:
        """Cache what is new, then draft token after token for all drafting requests at once."""
        drafting = np.flatnonzero(plan.caps).tolist()
        first, last = drafting[0], drafting[-1] + 1
        span = requests[first:last]
        texts = [self._text(request) for request in span]
        known = [len(text.tokens) - 1 for text in texts]
        # What more than a round has left, a prompt or what a bypass put off, is paid once and not timed as a draft.
        behind = [count - text.num_cached > self.draft_len + 1 for count, text in zip(known, texts, strict=True)]
        self._cache(span, [count if late else 0 for count, late in zip(known, behind, strict=True)])
        started = self._timer.clock()
        # All but a pass of the new tokens, so that the last pass holds every request's anchor.
        self._cache(span, known)
        tokens = np.zeros((len(requests), num_steps), np.int64)
        confidence = np.zeros((len(requests), num_steps), np.float32)
        for text in texts:
            text.proposed.clear()
        following = np.array([text.tokens[-1] for text in texts], np.int64)
        num_passes = min(num_steps, int(plan.caps.max()))
        # The last place of a slot is never read: where a request has no room left its drafts, which nobody verifies,
        # go there.
        end = self._engine.limits.max_seq_len - 1
        for step in range(num_passes):
            logits = self._pass(following, [min(text.num_cached + step, end) for text in texts], first)
            following = logits.argmax(axis=1)
            tokens[first:last, step] = following
            if with_confidence:
                confidence[first:last, step] = top_probability(logits)
            for row, token in enumerate(following.tolist()):
                # A request that rides along keeps what it had: nothing behind it is ever read.
                if plan.caps[first + row] > 0:
                    texts[row].proposed.append(token)
        self._timer.stats.draft_passes += num_passes
        return Draft(
            result=None,
            rows=np.where(plan.caps > 0, np.arange(len(requests)), -1),
            tokens=tokens,
            confidence=confidence if with_confidence else None,
            caps=plan.caps.copy(),
            seconds=self._timer.clock() - started,
        )

    def learn(
        self, requests: Sequence[ActiveRequest], draft: Draft | None, verify_len: IntArray, accepted: IntArray
    ) -> None:
        """Learn nothing."""

    def committed(self, request: ActiveRequest, tokens: Sequence[int]) -> None:
        """Append to the request's text; drafts that turned out right are cached already."""
        if not request.speculates:
            return
        text = self._text(request)
        if text.proposed:
            # The anchor and all drafts but the last were cached while drafting.
            right = 0
            for token, draft in zip(tokens, text.proposed[:-1], strict=False):
                if token != draft:
                    break
                right += 1
            text.num_cached = len(text.tokens) + right
            text.proposed.clear()
        text.tokens.extend(tokens)

    def moved(self, request: ActiveRequest, source: int, destination: int) -> None:
        """Copy the draft model's cache as the engine copies the target's."""
        text = self._texts.get(request)
        if text is not None and text.num_cached:
            self._timer.on_engine(
                self._engine.copy_slot, source, destination, num_tokens=text.num_cached, num_context=0
            )

    def close(self) -> None:
        """Release the draft model."""
        super().close()
        self._engine.close()

    def _new_text(self, prompt: list[int]) -> _Text:
        return _Text(prompt)

    def _cache(self, requests: list[ActiveRequest], lengths: list[int]) -> None:
        """Cache the first `lengths` tokens of each request, in as few passes as the draft engine takes."""
        texts = [self._text(request) for request in requests]
        room = self._engine.limits.max_num_tokens
        while True:
            missing = [
                length - text.num_cached if request.speculates else 0
                for request, text, length in zip(requests, texts, lengths, strict=True)
            ]
            rows = [row for row, count in enumerate(missing) if count > 0]
            if not rows:
                return
            # Neighbouring rows that still fit; one row alone may take several passes.
            taken, used = [rows[0]], min(missing[rows[0]], room)
            for row in rows[1:]:
                if row != taken[-1] + 1 or used + missing[row] > room:
                    break
                taken.append(row)
                used += missing[row]
            counts = [min(missing[row], room) for row in taken]
            starts = [texts[row].num_cached for row in taken]
            ids = [
                token
                for row, start, count in zip(taken, starts, counts, strict=True)
                for token in texts[row].tokens[start : start + count]
            ]
            batch = TokenBatch(
                np.array(ids, np.int64),
                np.array(counts, np.int64),
                np.array(starts, np.int64),
                # One row of logits is the least an engine computes.
                np.array([len(ids) - 1], np.int64),
                requests[taken[0]].slot,
            )
            self._timer.on_engine(self._engine.verify, batch)
            for row, count in zip(taken, counts, strict=True):
                texts[row].num_cached += count

    def _pass(self, tokens: IntArray, positions: Sequence[int], first_slot: int) -> FloatArray:
        """Return [R, V] logits after one more token of each request."""
        count = len(tokens)
        rows = np.arange(count, dtype=np.int64)
        batch = TokenBatch(tokens, np.ones(count, np.int64), np.array(positions, np.int64), rows, first_slot)
        return self._timer.on_engine(self._engine.verify, batch).logits

    def _rehearse(self, count: int, depth: int) -> None:
        """Draft for `count` requests of `depth` cached tokens."""
        deepest = max(0, min(depth, self._engine.limits.max_seq_len - self._draft_len - 1))
        tokens = np.zeros(count, np.int64)
        for step in range(self._draft_len):
            top_probability(self._pass(tokens, [deepest + step] * count, 0))


def top_probability(logits: FloatArray) -> FloatArray:
    """Return [R] the softmax of the largest logit."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(1.0 / shifted.sum(axis=1), np.float32)
