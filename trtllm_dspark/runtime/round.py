"""One round: draft, schedule, verify, accept. Read it from top to bottom.

The steps know slots and arrays; what a request is to its caller (text, stops, outputs) is the session's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core
from trtllm_dspark.engine.base import Engine, FloatArray, IntArray, TargetOutput, TokenBatch
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.listener import RoundListener
from trtllm_dspark.runtime.proposers.base import Chunks, Draft, Proposer
from trtllm_dspark.runtime.sampling import SamplingCache
from trtllm_dspark.runtime.stats import SessionStats
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation.controller import RoundOutcome, RoundPlan, SpeculationController
from trtllm_dspark.speculation.recorder import ConfidenceRecorder


@dataclass(slots=True)
class DecodePass:
    """The target pass over decoding requests; request r owns 1 + verify_len[r] consecutive rows of the output.

    Attributes:
        plan: what was decided about the round.
        depth: tokens cached before each row, on average.
        seconds: what the pass took.
    """

    requests: list[ActiveRequest]
    positions: IntArray
    verify_len: IntArray
    draft: Draft | None
    output: TargetOutput
    plan: RoundPlan
    depth: int
    seconds: float


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
        proposer: drafts.
        controller: decides what is drafted and verified.
        acceptance: `rejection` or `coupled`; greedy requests compare argmaxes in both.
        timer: counts what passes take, and the session's counters.
        recorder: told of every round's confidences and accepted lengths.
        listener: sees every decode pass.
    """

    def __init__(
        self,
        engine: Engine,
        proposer: Proposer | None,
        controller: SpeculationController,
        acceptance: Any,
        timer: PassTimer,
        *,
        recorder: ConfidenceRecorder | None = None,
        listener: RoundListener | None = None,
    ) -> None:
        self._engine = engine
        self._proposer = proposer
        self._controller = controller
        self._acceptance = acceptance
        self._timer = timer
        self._stats: SessionStats = timer.stats
        self._clock: Callable[[], float] = timer.clock
        self._recorder = recorder
        self._listener = listener
        self._sampling = SamplingCache()
        self._timed_s = 0.0

    def plan(self, requests: list[ActiveRequest], caps: IntArray, token_budget: int) -> RoundPlan:
        """Decide whether the round drafts, and for whom.

        Args:
            requests: decoding requests in slot order.
            caps: [R] int64, drafts of each that may be verified, 0 for one that does not draft.
            token_budget: drafts that fit into the round.
        """
        depth = _depth(requests)
        plan = self._timer.in_core(self._controller.plan, requests, caps=caps, token_budget=token_budget, depth=depth)
        if requests:
            self._stats.plans[plan.reason] = self._stats.plans.get(plan.reason, 0) + 1
        return plan

    def draft(self, requests: list[ActiveRequest], plan: RoundPlan) -> Draft | None:
        """Propose drafts where the plan wants some, else only let the proposer keep up."""
        if self._proposer is None:
            return None
        lazy = self._controller.adapts
        if not plan.drafts:
            self._proposer.catch_up(requests, lazy=lazy)
            return None
        return self._proposer.propose(
            requests,
            plan,
            num_steps=self._controller.draft_len,
            with_confidence=self._controller.needs_confidence or self._recorder is not None,
            lazy=lazy,
        )

    def schedule(self, requests: list[ActiveRequest], plan: RoundPlan, draft: Draft | None) -> IntArray:
        """Return [R] int64 drafts of each request to verify."""
        if draft is None:
            return np.zeros(len(requests), np.int64)
        return self._timer.in_core(
            self._controller.verify_lens,
            plan,
            requests,
            caps=draft.caps,
            confidence=draft.confidence,
            depth=_depth(requests),
        )

    def verify(
        self, requests: list[ActiveRequest], plan: RoundPlan, draft: Draft | None, verify_len: IntArray
    ) -> DecodePass | None:
        """Run the target over anchors and admitted drafts."""
        if not requests:
            return None
        anchors = np.array([request.anchor for request in requests], np.int64)
        positions = np.array([request.num_cached for request in requests], np.int64)
        tokens = anchors
        if draft is not None:
            tokens = _core.pack_tokens(anchors, draft.tokens, verify_len, positions).token_ids
        batch = TokenBatch(tokens, verify_len + 1, positions, np.arange(len(tokens), dtype=np.int64))
        started = self._clock()
        output = self._timer.on_engine(self._engine.verify, batch)
        seconds = self._clock() - started
        self._stats.verify_passes += 1
        return DecodePass(requests, positions, verify_len, draft, output, plan, _depth(requests), seconds)

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
        output = self._timer.on_engine(self._engine.verify, TokenBatch(tokens, lengths, starts, last_rows, first_slot))
        self._stats.prefill_passes += 1
        self._stats.prompt_tokens += len(tokens)
        for chunk in chunks:
            chunk.request.num_cached += chunk.length
        if self._proposer is not None:
            self._proposer.take_prompts(chunks, output.features, lazy=self._controller.adapts)
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
            started = self._clock()
            chosen = self._decide(
                decode.requests, decode.output.logits, decode.verify_len, decode.positions, decode.draft
            )
            wanted = self._proposer is not None and self._proposer.needs_features
            emitted += _with_features(decode, chosen, wanted=wanted)
            self._learn(decode, chosen, decode.seconds + self._clock() - started)
            if self._listener is not None:
                self._listener.round(decode, chosen)
        return emitted

    def observe_whole(self, decode: DecodePass | None, prefill: PrefillPass | None, seconds: float) -> None:
        """Tell the controller what the round accepted last took as a whole; prompts in it would hide what it asks."""
        if decode is not None and prefill is None:
            self._controller.observe_beside(decode.draft is not None, 1e6 * (seconds - self._timed_s))

    def _learn(self, decode: DecodePass, chosen: list[tuple[ActiveRequest, Choice]], verify_s: float) -> None:
        """Tell the controller, and who else listens, what became of the round."""
        draft = decode.draft
        # Before stops cut them: a draft behind a stop was right or wrong all the same.
        accepted = np.array([len(choice.tokens) - 1 for _, choice in chosen], np.int64)
        confidence = None if draft is None else draft.confidence
        drafted = np.zeros(len(chosen), np.bool_) if draft is None else draft.rows >= 0
        self._timed_s = verify_s + (0.0 if draft is None else draft.seconds)
        self._controller.observe(
            RoundOutcome(
                plan=decode.plan,
                requests=decode.requests,
                depth=decode.depth,
                verify_len=decode.verify_len,
                accepted=accepted,
                confidence=confidence,
                drafted=drafted,
                draft_us=None if draft is None else draft.seconds * 1e6,
                verify_us=verify_s * 1e6,
            )
        )
        if self._proposer is not None:
            self._proposer.learn(decode.requests, draft, decode.verify_len, accepted)
        if self._recorder is not None and confidence is not None:
            usable = drafted & (accepted >= 0)
            self._recorder.record(confidence[usable], decode.verify_len[usable], accepted[usable])

    def _decide(
        self,
        requests: list[ActiveRequest],
        logits: FloatArray,
        verify_len: IntArray,
        positions: IntArray,
        draft: Draft | None,
    ) -> list[tuple[ActiveRequest, Choice]]:
        if draft is not None and draft.certain is not None:
            return self._decide_by_kind(requests, logits, verify_len, positions, draft, draft.certain)
        logprobs = any([request.params.logprobs for request in requests])
        accepted = self._timer.in_core(
            _core.accept_ragged,
            _ban_end_tokens(requests, logits, verify_len),
            verify_len,
            positions,
            self._sampling.get(requests),
            draft=None if draft is None else draft.result,
            draft_rows=None if draft is None or draft.result is None else draft.rows,
            draft_tokens=None if draft is None or draft.result is not None else draft.tokens,
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

    def _decide_by_kind(
        self,
        requests: list[ActiveRequest],
        logits: FloatArray,
        verify_len: IntArray,
        positions: IntArray,
        draft: Draft,
        certain: NDArray[np.bool_],
    ) -> list[tuple[ActiveRequest, Choice]]:
        """Decide in two calls: the core takes one kind of q a call, and no request's decision reads its mates."""
        of_row = np.repeat(certain, verify_len + 1)
        chosen: dict[int, tuple[ActiveRequest, Choice]] = {}
        for result, mine in ((draft.result, ~certain), (None, certain)):
            places = np.flatnonzero(mine)
            part = replace(draft, result=result, rows=draft.rows[mine], tokens=draft.tokens[mine], certain=None)
            some = [requests[place] for place in places]
            rows = logits[of_row == (result is None)]
            decided = self._decide(some, rows, verify_len[mine], positions[mine], part)
            chosen |= zip(places.tolist(), decided, strict=True)
        return [chosen[place] for place in range(len(requests))]


def _depth(requests: list[ActiveRequest]) -> int:
    return sum([request.num_cached for request in requests]) // len(requests) if requests else 0


def _with_features(decode: DecodePass, chosen: list[tuple[ActiveRequest, Choice]], *, wanted: bool) -> list[Emitted]:
    """Add to each choice what was drafted and verified, and the features of the rows that were committed."""
    draft, features = decode.draft, decode.output.features
    rows = [-1] * len(chosen) if draft is None else draft.rows.tolist()
    num_steps = 0 if draft is None else draft.num_steps
    emitted, start = [], 0
    for (request, choice), verified, row in zip(chosen, decode.verify_len.tolist(), rows, strict=True):
        committed = features[start : start + len(choice.tokens)] if wanted and request.speculates else None
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
