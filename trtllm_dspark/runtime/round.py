"""One round: draft, schedule, verify, accept. Read it from top to bottom.

The steps know slots and arrays; what a request is to its caller (text, stops, outputs) is the session's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import ContextBatch, Engine, FloatArray, IntArray, TargetOutput, TokenBatch
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.batcher import PromptChunk
from trtllm_dspark.runtime.sampling import SamplingCache
from trtllm_dspark.runtime.stats import SessionStats
from trtllm_dspark.speculation.scheduler import PrefixScheduler

P = ParamSpec("P")
T = TypeVar("T")
Chunks = Sequence[PromptChunk[ActiveRequest]]


@dataclass(slots=True)
class Draft:
    """Drafts of one round.

    Attributes:
        result: what the core drafted for the rows [first, first + R') of the decoding requests.
        first: first row that drafts.
        rows: [R] int64, row in `result` of each decoding request, -1 for one that does not draft.
        tokens: [R, draft_len] int64, 0 where nothing was drafted.
        confidence: [R, draft_len] float32, or None where the schedule needs none.
        caps: [R] int64, most drafts to verify.
    """

    result: _core.Draft
    first: int
    rows: IntArray
    tokens: IntArray
    confidence: FloatArray | None
    caps: IntArray


@dataclass(slots=True)
class DecodePass:
    """The target pass over decoding requests; request r owns 1 + verify_len[r] consecutive rows of the output."""

    requests: list[ActiveRequest]
    positions: IntArray
    verify_len: IntArray
    draft: Draft | None
    output: TargetOutput


@dataclass(slots=True)
class PrefillPass:
    """The target pass over prompt chunks; `output` has one row for each of `completed`."""

    completed: list[ActiveRequest]
    output: TargetOutput


@dataclass(slots=True)
class Emitted:
    """What the target decided for one request.

    Attributes:
        tokens: accepted drafts and the corrected or bonus token; empty when `status` is not 0.
        logprobs: one a token, where the request asked for them.
        drafted: drafts proposed.
        verified: drafts verified.
        status: 0, or why the core refused the request's logits.
        features: [len(tokens), m * d] target features of the anchor and the accepted drafts, or None.
        prefill: whether these tokens came from the prompt's last row.
    """

    request: ActiveRequest
    tokens: list[int]
    logprobs: list[float]
    drafted: int
    verified: int
    status: int
    features: FloatArray | None
    prefill: bool


class RoundSteps:
    """The steps of a round over one engine.

    Args:
        engine: target and drafter passes.
        scheduler: None decodes plainly.
        acceptance: `rejection` or `coupled`; greedy requests compare argmaxes in both.
        stats: session counters to add to.
    """

    def __init__(self, engine: Engine, scheduler: PrefixScheduler | None, acceptance: Any, stats: SessionStats) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._acceptance = acceptance
        self._stats = stats
        self._sampling = SamplingCache()
        self._draft_sampling = SamplingCache()

    def draft(self, requests: list[ActiveRequest]) -> Draft | None:
        """Let the drafter's context catch up with the tokens of last round, then draft one block a request."""
        scheduler = self._scheduler
        if scheduler is None or not requests:
            return None
        self._absorb_committed(requests)
        caps = np.array([min(request.draft_cap, scheduler.draft_len) for request in requests], np.int64)
        drafting = np.flatnonzero(caps > 0)
        if drafting.size == 0:
            return None
        # One pass covers contiguous slots: a request inside the span that does not draft rides along unread.
        first, last = int(drafting[0]), int(drafting[-1]) + 1
        span = requests[first:last]
        anchors = np.array([request.anchor for request in span], np.int64)
        positions = np.array([request.num_context for request in span], np.int64)
        block = self._on_engine(self._engine.draft_block, anchors, positions, first_slot=first)
        self._stats.draft_passes += 1
        result = self._in_core(
            _core.draft_chain,
            self._engine.heads,
            block.base_logits,
            anchors,
            positions,
            self._draft_sampling.get(span),
            hidden=block.hidden,
            acceptance=self._acceptance,
            num_steps=scheduler.draft_len,
        )
        rows = np.full(len(requests), -1, np.int64)
        tokens = np.zeros((len(requests), scheduler.draft_len), np.int64)
        rows[drafting] = drafting - first
        caps[first:last][result.status != _core.STATUS_OK] = 0
        tokens[first:last] = np.maximum(result.tokens, 0)
        confidence = None
        if scheduler.config.needs_confidence:
            confidence = np.zeros((len(requests), scheduler.draft_len), np.float32)
            confidence[first:last] = self._in_core(
                _core.confidence, self._engine.heads, block.hidden, anchors, result.tokens
            )
        return Draft(result, first, rows, tokens, confidence, caps)

    def schedule(self, requests: list[ActiveRequest], draft: Draft | None, token_budget: int) -> IntArray:
        """Return [R] int64 drafts of each request to verify."""
        if draft is None or self._scheduler is None:
            return np.zeros(len(requests), np.int64)
        return self._in_core(
            self._scheduler.verify_lens,
            requests,
            caps=draft.caps,
            confidence=draft.confidence,
            token_budget=token_budget,
        )

    def verify(self, requests: list[ActiveRequest], draft: Draft | None, verify_len: IntArray) -> DecodePass | None:
        """Run the target over anchors and admitted drafts."""
        if not requests:
            return None
        anchors = np.array([request.anchor for request in requests], np.int64)
        positions = np.array([request.num_cached for request in requests], np.int64)
        tokens = anchors
        if draft is not None:
            tokens = _core.pack_tokens(anchors, draft.tokens, verify_len, positions).token_ids
        batch = TokenBatch(tokens, verify_len + 1, positions, np.arange(len(tokens), dtype=np.int64))
        output = self._on_engine(self._engine.verify, batch)
        self._stats.verify_passes += 1
        return DecodePass(requests, positions, verify_len, draft, output)

    def prefill(self, chunks: Chunks) -> PrefillPass | None:
        """Run the target over prompt chunks and give their features to the drafter."""
        if not chunks:
            return None
        lengths = np.array([chunk.length for chunk in chunks], np.int64)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        tokens = np.concatenate([chunk.request.prompt[chunk.start : chunk.start + chunk.length] for chunk in chunks])
        completes = np.array([chunk.completes for chunk in chunks])
        last_rows = (np.cumsum(lengths) - 1)[completes]
        first_slot = chunks[0].request.slot
        output = self._on_engine(self._engine.verify, TokenBatch(tokens, lengths, starts, last_rows, first_slot))
        self._stats.prefill_passes += 1
        self._stats.prompt_tokens += len(tokens)
        for chunk in chunks:
            chunk.request.num_cached += chunk.length
        if self._scheduler is not None:
            self._absorb_prompts(chunks, output.features, first_slot)
        return PrefillPass([chunk.request for chunk in chunks if chunk.completes], output)

    def accept(self, decode: DecodePass | None, prefill: PrefillPass | None) -> list[Emitted]:
        """Decide the tokens of every request of the round."""
        emitted: list[Emitted] = []
        if prefill is not None and prefill.completed:
            # The prompt's last token is the anchor of the first output token: a round without drafts.
            positions = np.array([request.num_prompt - 1 for request in prefill.completed], np.int64)
            none = np.zeros(len(prefill.completed), np.int64)
            accepted = self._decide(prefill.completed, prefill.output.logits, none, positions, None)
            emitted += [self._emitted(accepted, row, request) for row, request in enumerate(prefill.completed)]
        if decode is not None:
            accepted = self._decide(
                decode.requests, decode.output.logits, decode.verify_len, decode.positions, decode.draft
            )
            start = 0
            for row, request in enumerate(decode.requests):
                emitted.append(self._emitted(accepted, row, request, decode, start))
                start += 1 + int(decode.verify_len[row])
        return emitted

    def _decide(
        self,
        requests: list[ActiveRequest],
        logits: FloatArray,
        verify_len: IntArray,
        positions: IntArray,
        draft: Draft | None,
    ) -> _core.Accepted:
        return self._in_core(
            _core.accept_ragged,
            _ban_end_tokens(requests, logits, verify_len),
            verify_len,
            positions,
            self._sampling.get(requests),
            draft=None if draft is None else draft.result,
            draft_rows=None if draft is None else draft.rows,
            acceptance=self._acceptance,
            logprobs=any(request.params.logprobs for request in requests),
        )

    def _emitted(
        self,
        accepted: _core.Accepted,
        row: int,
        request: ActiveRequest,
        decode: DecodePass | None = None,
        start: int = 0,
    ) -> Emitted:
        count = int(accepted.emitted_len[row])
        logprobs: list[float] = []
        if accepted.logprobs is not None and request.params.logprobs:
            logprobs = accepted.logprobs[row, :count].tolist()
        drafted = verified = 0
        features = None
        if decode is not None:
            verified = int(decode.verify_len[row])
            if decode.draft is not None and decode.draft.rows[row] >= 0:
                drafted = decode.draft.result.num_steps
            if request.speculates:
                features = decode.output.features[start : start + count]
        return Emitted(
            request=request,
            tokens=accepted.tokens[row, :count].tolist(),
            logprobs=logprobs,
            drafted=drafted,
            verified=verified,
            status=int(accepted.status[row]),
            features=features,
            prefill=decode is None,
        )

    def _absorb_committed(self, requests: list[ActiveRequest]) -> None:
        behind = [request.features for request in requests if request.features is not None]
        if not behind:
            return
        lengths = [0 if request.features is None else len(request.features) for request in requests]
        batch = ContextBatch(
            features=behind[0] if len(behind) == 1 else np.concatenate(behind),
            row_lens=np.array(lengths, np.int64),
            write_indices=np.array([request.num_context for request in requests], np.int64),
        )
        self._on_engine(self._engine.absorb, batch)
        for request, length in zip(requests, lengths, strict=True):
            request.num_context += length
            request.features = None

    def _absorb_prompts(self, chunks: Chunks, features: FloatArray, first_slot: int) -> None:
        if not any(chunk.request.speculates for chunk in chunks):
            return
        lengths = np.array([chunk.length if chunk.request.speculates else 0 for chunk in chunks], np.int64)
        if not all(chunk.request.speculates for chunk in chunks):
            wanted = [np.full(chunk.length, chunk.request.speculates) for chunk in chunks]
            features = features[np.concatenate(wanted)]
        starts = np.array([chunk.request.num_context for chunk in chunks], np.int64)
        self._on_engine(self._engine.absorb, ContextBatch(features, lengths, starts, first_slot))
        for chunk, length in zip(chunks, lengths.tolist(), strict=True):
            chunk.request.num_context += length

    def _on_engine(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        self._stats.engine_s += time.perf_counter() - start
        return result

    def _in_core(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        self._stats.core_s += time.perf_counter() - start
        return result


def _ban_end_tokens(requests: list[ActiveRequest], logits: FloatArray, verify_len: IntArray) -> FloatArray:
    """Return logits in which no request can end before its `min_tokens`."""
    if all(request.ban_len <= 0 for request in requests):
        return logits
    logits = logits.copy()
    start = 0
    for request, length in zip(requests, (verify_len + 1).tolist(), strict=True):
        banned = min(length, request.ban_len)
        if banned > 0 and request.banned_tokens is not None:
            logits[start : start + banned, request.banned_tokens] = -np.inf
        start += length
    return logits
