"""Drafts of an autoregressive drafter (EAGLE-3-style, MTP-1): one step of it for every draft token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core
from trtllm_dspark.engine.base import AutoregressiveEngine, Engine, FloatArray, IntArray, PairBatch
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.proposers._draft_times import with_draft_times
from trtllm_dspark.runtime.proposers._features import FeatureProposer, Scalar, padded
from trtllm_dspark.runtime.proposers.base import AcceptanceMode, Draft
from trtllm_dspark.runtime.proposers.draft_model import top_probability
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation.controller import RoundPlan
from trtllm_dspark.speculation.cost_table import CostTable


@dataclass(slots=True)
class _Text:
    """A request's tokens, and the state [d] of the last feature that was absorbed."""

    tokens: list[int]
    state: FloatArray | None = None


class AutoregressiveProposer(FeatureProposer):
    """Draft token after token, each from the hidden state of the one before.

    Drafts are sampled like a block's, and q is kept as sampled from. There is no confidence head: the confidence is the
    drafter's largest probability at each position, known before the token is drawn, so that every schedule stays
    lossless.

    Args:
        engine: target and drafter passes.
        acceptance: how its drafts will be accepted.
        timer: counts what passes take.
    """

    def __init__(self, engine: Engine, acceptance: AcceptanceMode, timer: PassTimer) -> None:
        super().__init__(engine, acceptance, timer)
        self._head = cast(AutoregressiveEngine, engine).draft_head
        self._texts: dict[ActiveRequest, _Text] = {}

    @property
    def has_confidence(self) -> bool:
        """The drafter's largest probability at each position."""
        return True

    def costs(self, table: CostTable) -> CostTable:
        """Return the target's times with those of the drafter's steps, which are measured here."""
        return with_draft_times(table, self._rehearse)

    def propose(
        self, requests: list[ActiveRequest], plan: RoundPlan, *, num_steps: int, with_confidence: bool, lazy: bool
    ) -> Draft:
        """Absorb what was committed, then draft token after token for all drafting requests at once."""
        self._absorb_backlog(requests, plan, lazy=lazy)
        started = self._timer.clock()
        first, last = self._absorb_for(requests, plan, lazy=lazy)
        # A request inside the span that does not draft rides along: what it writes lies behind its pairs.
        span, drafting = requests[first:last], plan.caps[first:last] > 0
        anchors = np.array([request.anchor for request in span], np.int64)
        positions = np.array([request.num_context for request in span], np.int64)
        logits, result = self._draft(
            anchors,
            positions,
            # The last pair of a drafting request was absorbed just now; its first step gives what it predicts.
            rows=positions - drafting,
            state=self._states(span),
            sampling=self._sampling.get(span),
            num_steps=min(num_steps, int(plan.caps.max())),
            first_slot=first,
        )
        caps = plan.caps.copy()
        caps[first:last][result.status != _core.STATUS_OK] = 0
        confidence = None
        if with_confidence:
            confidence = padded(_filled(_confidence(logits, plan), num_steps), first, len(requests))
        return Draft(
            result=result,
            rows=np.where(plan.caps > 0, np.arange(len(requests)) - first, -1),
            tokens=padded(_filled(result.tokens, num_steps), first, len(requests)),
            confidence=confidence,
            caps=caps,
            seconds=self._timer.clock() - started,
        )

    def committed(self, request: ActiveRequest, tokens: Sequence[int]) -> None:
        """Append to the request's text: the token behind a feature goes with it."""
        if request.speculates:
            self._text(request).tokens.extend(tokens)

    def forget(self, request: ActiveRequest) -> None:
        """Drop the request's text."""
        self._texts.pop(request, None)

    def _draft(
        self,
        anchors: IntArray,
        positions: IntArray,
        *,
        rows: IntArray,
        state: FloatArray,
        sampling: _core.Sampling,
        num_steps: int,
        first_slot: int,
    ) -> tuple[FloatArray, _core.Draft]:
        """Return logits [R, num_steps, Vd] and the drafts sampled from them."""
        logits = np.empty((len(anchors), num_steps, self._engine.limits.draft_vocab_size), np.float32)
        tokens, result = anchors, None
        for step in range(num_steps):
            output = self._timer.on_engine(self._head.step, state, tokens, rows + step, first_slot=first_slot)
            state, logits[:, step] = output.state, output.logits
            # A draw depends on seed, anchor's position and step alone: earlier tokens come out again as they were, and
            # the last chain holds the q of all of them.
            result = self._timer.in_core(
                _core.draft_chain,
                self._engine.heads,
                np.ascontiguousarray(logits[:, : step + 1]),
                anchors,
                positions,
                sampling,
                acceptance=self._acceptance,
            )
            # A row that the core refused has no token; it is not verified.
            tokens = np.maximum(result.tokens[:, step], 0)
        assert result is not None
        self._timer.stats.draft_passes += num_steps
        return logits, result

    def _states(self, requests: list[ActiveRequest]) -> FloatArray:
        """Return [R, d] the states of the last features; zeros for a request that has absorbed none."""
        states = [self._text(request).state for request in requests]
        known = next(state for state in states if state is not None)
        return np.stack([np.zeros_like(known) if state is None else state for state in states])

    def _text(self, request: ActiveRequest) -> _Text:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(request.prompt.tolist())
        return text

    def _ready(self, request: ActiveRequest) -> int:
        """Hold back the feature of the newest token, behind which none is known yet."""
        if not request.num_pending:
            return 0
        return min(request.num_pending, len(self._text(request).tokens) - 1 - request.num_context)

    def _run(self, requests: list[ActiveRequest], features: FloatArray, row_lens: IntArray, starts: IntArray) -> None:
        parts = zip(requests, starts.tolist(), row_lens.tolist(), strict=True)
        tokens = [self._text(request).tokens[start + 1 : start + 1 + length] for request, start, length in parts]
        token_ids = np.array([token for part in tokens for token in part], np.int64)
        batch = PairBatch(features, token_ids, row_lens, starts, requests[0].slot)
        states = self._timer.on_engine(self._head.absorb, batch)
        for request, end, length in zip(requests, np.cumsum(row_lens).tolist(), row_lens.tolist(), strict=True):
            if length:
                self._text(request).state = states[end - 1].copy()

    def _rehearse(self, count: int, depth: int) -> None:
        """Absorb a token and draft for `count` requests of `depth` cached tokens."""
        limits = self._engine.limits
        ones, zeros = np.ones(count, np.int64), np.zeros(count, np.int64)
        rows = np.full(count, min(depth, limits.max_seq_len - limits.max_draft_len - 1), np.int64)
        features = np.zeros((count, limits.feature_size), np.float32)
        state = self._head.absorb(PairBatch(features, zeros, ones, rows))
        sampling = _core.Sampling(np.zeros(count, np.float32), np.arange(count, dtype=np.uint64))
        logits, _ = self._draft(
            zeros, rows + 1, rows=rows, state=state, sampling=sampling, num_steps=self.draft_len, first_slot=0
        )
        top_probability(logits.reshape(-1, logits.shape[-1]))


def _confidence(logits: FloatArray, plan: RoundPlan) -> FloatArray:
    """Return [R, n] the largest probability at each position, calibrated as the plan says."""
    count, steps, vocab = logits.shape
    top = top_probability(logits.reshape(-1, vocab)).reshape(count, steps)
    if plan.temperature is None or plan.bias is None:
        return top
    clipped = np.clip(top.astype(np.float64), 1e-7, 1 - 1e-7)
    logit = np.log(clipped / (1 - clipped)) / plan.temperature[:steps] + plan.bias[:steps]
    return np.asarray(0.5 * (1 + np.tanh(0.5 * logit)), np.float32)


def _filled(values: NDArray[Scalar], num_steps: int) -> NDArray[Scalar]:
    """Return [R, num_steps] with zeros behind the steps that were made."""
    return np.pad(values, ((0, 0), (0, num_steps - values.shape[1])))
