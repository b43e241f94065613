"""One round: draft, schedule, verify, accept. Read it from top to bottom.

The steps know slots and arrays; what a request is to its caller (text, stops, outputs) is the session's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core
from trtllm_dspark.engine.base import ContextBatch, Engine, FloatArray, IntArray, TargetOutput, TokenBatch
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.batcher import PromptChunk
from trtllm_dspark.runtime.sampling import SamplingCache
from trtllm_dspark.runtime.stats import SessionStats
from trtllm_dspark.speculation.calibration import Calibration
from trtllm_dspark.speculation.recorder import ConfidenceRecorder
from trtllm_dspark.speculation.scheduler import PrefixScheduler

P = ParamSpec("P")
T = TypeVar("T")
Scalar = TypeVar("Scalar", np.int64, np.float32)
Chunks = Sequence[PromptChunk[ActiveRequest]]


@dataclass(slots=True)
class Draft:
    """Drafts of one round.

    Attributes:
        result: what the core drafted for the span of decoding requests that draft.
        rows: [R] int64, row in `result` of each decoding request, -1 for one that does not draft.
        tokens: [R, draft_len] int64; rows outside the span are 0, a row the core refused is -1.
        confidence: [R, draft_len] float32, or None where the schedule needs none.
        caps: [R] int64, most drafts to verify.
    """

    result: _core.Draft
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
class Choice:
    """What the target chose for one request.

    Attributes:
        tokens: accepted drafts and the corrected or bonus token; empty when `status` is not 0.
        logprobs: one a token, where the request asked for them.
        status: 0, or why the core refused the request's logits.
    """

    tokens: list[int]
    logprobs: list[float]
    status: int


@dataclass(slots=True)
class Emitted:
    """The tokens of one request and where they came from.

    Attributes:
        choice: the tokens.
        drafted: drafts proposed.
        verified: drafts verified.
        features: [len(tokens), m * d] target features of the anchor and the accepted drafts, or None.
        prefill: whether the tokens came from the prompt's last row.
    """

    request: ActiveRequest
    choice: Choice
    drafted: int
    verified: int
    features: FloatArray | None
    prefill: bool


class RoundSteps:
    """The steps of a round over one engine.

    Args:
        engine: target and drafter passes.
        scheduler: None decodes plainly.
        acceptance: `rejection` or `coupled`; greedy requests compare argmaxes in both.
        stats: session counters to add to.
        calibration: applied to the confidences; None = as the head gives them.
        recorder: told of every round's confidences and accepted lengths.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: PrefixScheduler | None,
        acceptance: Any,
        stats: SessionStats,
        *,
        calibration: Calibration | None = None,
        recorder: ConfidenceRecorder | None = None,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._acceptance = acceptance
        self._stats = stats
        self._recorder = recorder
        self._temperature: FloatArray | None = None
        self._bias: FloatArray | None = None
        if scheduler is not None and calibration is not None:
            self._temperature, self._bias = calibration.arrays(scheduler.draft_len)
        self._sampling = SamplingCache()
        self._draft_sampling = SamplingCache()

    def draft(self, requests: list[ActiveRequest], caps: list[int]) -> Draft | None:
        """Let the drafter's context catch up with the tokens of last round, then draft one block a request.

        Args:
            requests: decoding requests in slot order.
            caps: drafts of each that may be verified, 0 for one that does not draft.
        """
        scheduler = self._scheduler
        if scheduler is None or not requests:
            return None
        self._absorb_committed(requests)
        drafting = [row for row, cap in enumerate(caps) if cap > 0]
        if not drafting:
            return None
        # One pass covers contiguous slots: a request inside the span that does not draft rides along unread.
        first, last = drafting[0], drafting[-1] + 1
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
        tokens = result.tokens
        confidence = None
        if scheduler.config.needs_confidence or self._recorder is not None:
            confidence = self._in_core(
                _core.confidence,
                self._engine.heads,
                block.hidden,
                anchors,
                tokens,
                temperature=self._temperature,
                bias=self._bias,
            )
        status = result.status.tolist()
        limits = [min(cap, scheduler.draft_len) for cap in caps]
        for row in range(first, last):
            if status[row - first] != _core.STATUS_OK:
                limits[row] = 0
        rows = [row - first if cap > 0 else -1 for row, cap in enumerate(caps)]
        return Draft(
            result=result,
            rows=np.array(rows, np.int64),
            tokens=_padded(tokens, first, len(requests)),
            confidence=None if confidence is None else _padded(confidence, first, len(requests)),
            caps=np.array(limits, np.int64),
        )

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
            depth=sum(request.num_cached for request in requests) // len(requests),
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
            for request, choice in self._decide(prefill.completed, prefill.output.logits, none, positions, None):
                emitted.append(Emitted(request, choice, drafted=0, verified=0, features=None, prefill=True))
        if decode is not None:
            chosen = self._decide(
                decode.requests, decode.output.logits, decode.verify_len, decode.positions, decode.draft
            )
            emitted += _with_features(decode, chosen)
            self._record(decode, chosen)
        return emitted

    def _record(self, decode: DecodePass, chosen: list[tuple[ActiveRequest, Choice]]) -> None:
        draft = decode.draft
        if self._recorder is None or draft is None or draft.confidence is None:
            return
        # Before stops cut them: a draft behind a stop was right or wrong all the same.
        accepted = np.array([len(choice.tokens) - 1 for _, choice in chosen], np.int64)
        usable = (draft.rows >= 0) & (accepted >= 0)
        self._recorder.record(draft.confidence[usable], decode.verify_len[usable], accepted[usable])

    def _decide(
        self,
        requests: list[ActiveRequest],
        logits: FloatArray,
        verify_len: IntArray,
        positions: IntArray,
        draft: Draft | None,
    ) -> list[tuple[ActiveRequest, Choice]]:
        logprobs = any([request.params.logprobs for request in requests])
        accepted = self._in_core(
            _core.accept_ragged,
            _ban_end_tokens(requests, logits, verify_len),
            verify_len,
            positions,
            self._sampling.get(requests),
            draft=None if draft is None else draft.result,
            draft_rows=None if draft is None else draft.rows,
            acceptance=self._acceptance,
            logprobs=logprobs,
        )
        # The core makes a new array at every access.
        tokens, status = accepted.tokens.tolist(), accepted.status.tolist()
        values = accepted.logprobs.tolist() if accepted.logprobs is not None else [[]] * len(requests)
        chosen = []
        for row, (request, count) in enumerate(zip(requests, accepted.emitted_len.tolist(), strict=True)):
            own = values[row][:count] if request.params.logprobs else []
            chosen.append((request, Choice(tokens[row][:count], own, status[row])))
        return chosen

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


def _padded(span: NDArray[Scalar], first: int, num_rows: int) -> NDArray[Scalar]:
    """Return [num_rows, n] with `span` from row `first` on and zeros around it."""
    if len(span) == num_rows:
        return span
    padded = np.zeros((num_rows, span.shape[1]), span.dtype)
    padded[first : first + len(span)] = span
    return padded


def _with_features(decode: DecodePass, chosen: list[tuple[ActiveRequest, Choice]]) -> list[Emitted]:
    """Add to each choice what was drafted and verified, and the features of the rows that were committed."""
    draft, features = decode.draft, decode.output.features
    rows = [-1] * len(chosen) if draft is None else draft.rows.tolist()
    num_steps = 0 if draft is None else draft.result.num_steps
    emitted, start = [], 0
    for (request, choice), verified, row in zip(chosen, decode.verify_len.tolist(), rows, strict=True):
        committed = features[start : start + len(choice.tokens)] if request.speculates else None
        emitted.append(Emitted(request, choice, num_steps if row >= 0 else 0, verified, committed, prefill=False))
        start += 1 + verified
    return emitted


def _ban_end_tokens(requests: list[ActiveRequest], logits: FloatArray, verify_len: IntArray) -> FloatArray:
    """Return logits in which no request can end before its `min_tokens`."""
    if all([request.ban_len <= 0 for request in requests]):
        return logits
    logits = logits.copy()
    start = 0
    for request, length in zip(requests, (verify_len + 1).tolist(), strict=True):
        banned = min(length, request.ban_len)
        if banned > 0 and request.banned_tokens is not None:
            logits[start : start + banned, request.banned_tokens] = -np.inf
        start += length
    return logits
