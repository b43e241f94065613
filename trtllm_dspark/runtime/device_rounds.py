"""Rounds of an engine that runs whole rounds on its device, seen from requests.

Submitting describes a round from what is known: the host is one round behind, so counts of a request are lower bounds
and the device clamps what depends on the exact ones. Collecting yields the same `Emitted` as the round of a CPU engine;
what came of a request that has ended since is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import IntArray
from trtllm_dspark.engine.rounds import (
    CompiledRounds,
    DecodeRows,
    PromptRows,
    RoundBatch,
    RoundEngine,
    RoundResult,
    RowResults,
    RowSampling,
    Ticket,
)
from trtllm_dspark.errors import RequestError
from trtllm_dspark.runtime.active import NO_SLOT, ActiveRequest
from trtllm_dspark.runtime.batcher import PromptChunk
from trtllm_dspark.runtime.round import Choice, Emitted
from trtllm_dspark.runtime.sampling_params import SamplingParams
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation.controller import RoundOutcome, RoundPlan, SpeculationController
from trtllm_dspark.speculation.device_schedule import DeviceScheduler
from trtllm_dspark.speculation.recorder import ConfidenceRecorder

Chunks = Sequence[PromptChunk[ActiveRequest]]


@dataclass(frozen=True, slots=True)
class DevicePass:
    """A round on the device: who took part, in the order of its rows."""

    ticket: Ticket
    requests: list[ActiveRequest]
    completed: list[ActiveRequest]
    plan: RoundPlan
    depth: int
    has_prompts: bool


class DeviceRounds:
    """Submit and collect the rounds of one session.

    Args:
        engine: runs them.
        controller: decides what is drafted.
        acceptance: of sampled requests.
        timer: of the session.
        recorder: told of every round's confidences and accepted lengths.

    Raises:
        ConfigError: the engine's rounds were compiled for others.
    """

    def __init__(
        self,
        engine: RoundEngine,
        controller: SpeculationController,
        acceptance: Literal["rejection", "coupled"],
        timer: PassTimer,
        *,
        recorder: ConfidenceRecorder | None = None,
    ) -> None:
        self._compiled = engine if isinstance(engine, CompiledRounds) else None
        if self._compiled is not None:
            self._compiled.check_session(controller.config.mode, acceptance)
        self._engine, self._controller, self._acceptance = engine, controller, acceptance
        self._timer, self._recorder = timer, recorder
        self._scheduler = DeviceScheduler(controller, max_requests=engine.limits.max_batch_size)
        # Batches change when requests come and go, not every round.
        self._sampled: tuple[tuple[ActiveRequest, ...], int] = ((), 0)
        self._sampling = _sampling(())

    @property
    def rounds_in_flight(self) -> int:
        """Rounds that may be submitted and not collected."""
        return self._engine.rounds_in_flight

    def check(self, params: SamplingParams, num_banned: int) -> None:
        """Refuse what needs the logits on the host, or between target and acceptance where those are one plan.

        Args:
            params: of a request.
            num_banned: its end tokens, where it has a `min_tokens`.

        Raises:
            RequestError: the request wants it.
        """
        if self._compiled is not None:
            _check_compiled(self._compiled, params, num_banned)
        if params.logprobs:
            raise RequestError(
                "log-probabilities need rounds one at a time; serve without --kernel_library", code="no_logprobs"
            )
        if num_banned > self._engine.max_banned:
            raise RequestError(
                f"min_tokens with {num_banned} end tokens, this engine takes {self._engine.max_banned}; "
                "give fewer stop_token_ids",
                code="too_many_stop_tokens",
            )

    def submit(
        self, requests: list[ActiveRequest], caps: IntArray, token_budget: int, chunks: Chunks
    ) -> DevicePass | None:
        """Enqueue a round; None where there is nothing to do.

        Args:
            requests: decoding requests in slot order, slots 0 .. R - 1.
            caps: [R] drafts of each that may be verified, as far as the host knows.
            token_budget: drafts that fit into the round.
            chunks: prompt chunks in slot order.
        """
        if not requests and not chunks:
            return None
        depth = sum(request.num_cached for request in requests) // max(1, len(requests))
        plan = self._timer.in_core(self._controller.plan, requests, caps=caps, token_budget=token_budget, depth=depth)
        stats = self._timer.stats
        decode = None
        if requests:
            stats.plans[plan.reason] = stats.plans.get(plan.reason, 0) + 1
            stats.verify_passes += 1
            stats.draft_passes += plan.drafts
            schedule = self._scheduler.schedule(plan, requests, depth=depth)
            decode = DecodeRows(plan.caps, self._sampling_of(requests), schedule)
        batch = RoundBatch(decode, _prompts(chunks), self._acceptance)
        ticket = self._timer.on_engine(self._engine.submit_round, batch)
        if chunks:
            stats.prefill_passes += 1
            stats.prompt_tokens += sum(chunk.length for chunk in chunks)
        for chunk in chunks:
            chunk.request.num_cached += chunk.length
        completed = [chunk.request for chunk in chunks if chunk.completes]
        return DevicePass(ticket, list(requests), completed, plan, depth, bool(chunks))

    def collect(self, finished: DevicePass) -> list[Emitted]:
        """Wait for the oldest round and return what its live requests gained."""
        result = self._timer.on_engine(self._engine.collect_round, finished.ticket)
        emitted: list[Emitted] = []
        if result.prompts is not None:
            for row, request in enumerate(finished.completed):
                if not _ended(request):
                    choice = _choice(result.prompts, row)
                    emitted.append(Emitted(request, choice, drafted=0, verified=0, features=None, prefill=True))
        if result.decode is not None and result.verify_len is not None:
            emitted += self._decoded(finished, result, result.decode, result.verify_len)
        return emitted

    def move(self, request: ActiveRequest, source: int, destination: int) -> None:
        """Move a request's slot behind the rounds that were submitted."""
        # Rounds in flight may have cached more than the host knows.
        more = self._engine.rounds_in_flight * (self._engine.limits.max_draft_len + 1)
        most = request.num_cached + more
        self._timer.on_engine(self._engine.copy_slot, source, destination, num_tokens=most, num_context=most)

    def forget(self, request: ActiveRequest) -> None:
        """Drop what is kept about a request that has ended."""
        self._scheduler.forget(request)

    def _sampling_of(self, requests: list[ActiveRequest]) -> RowSampling:
        batch = tuple(requests), sum([request.ban_len > 0 for request in requests])
        if batch != self._sampled:
            self._sampled, self._sampling = batch, _sampling(requests)
        return self._sampling

    def _decoded(
        self, finished: DevicePass, result: RoundResult, rows: RowResults, verify_len: IntArray
    ) -> list[Emitted]:
        plan, requests = finished.plan, finished.requests
        failed = np.zeros(len(requests), np.bool_) if result.draft_failed is None else result.draft_failed
        live = np.array([not _ended(request) for request in requests])
        drafted = (plan.caps > 0) & ~failed & live
        accepted = np.where(live & (rows.emitted_len > 0), rows.emitted_len - 1, -1)
        self._learn(finished, result, verify_len, accepted, drafted)
        num_steps = self._engine.limits.max_draft_len
        emitted = []
        for row in np.flatnonzero(live).tolist():
            choice = _choice(rows, row)
            if choice.tokens or choice.status != _core.STATUS_OK:
                steps = num_steps if drafted[row] else 0
                emitted.append(
                    Emitted(requests[row], choice, steps, int(verify_len[row]), features=None, prefill=False)
                )
        return emitted

    def _learn(
        self,
        finished: DevicePass,
        result: RoundResult,
        verify_len: IntArray,
        accepted: IntArray,
        drafted: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    ) -> None:
        plan, confidence = finished.plan, result.confidence
        if confidence is not None:
            confidence = np.ascontiguousarray(confidence[:, : max(1, self._controller.draft_len)])
            self._scheduler.observe(finished.requests, confidence, np.flatnonzero(drafted))
        self._controller.observe(
            RoundOutcome(
                plan=plan,
                requests=finished.requests,
                depth=finished.depth,
                verify_len=verify_len,
                accepted=accepted,
                confidence=confidence,
                drafted=drafted,
                # Only the whole round is timed; the cost table knows nothing of prompts.
                round_us=None if finished.has_prompts else result.device_us,
            )
        )
        usable = drafted & (accepted >= 0)
        if self._recorder is not None and confidence is not None and usable.any():
            self._recorder.record(confidence[usable], verify_len[usable], accepted[usable])


def _check_compiled(engine: CompiledRounds, params: SamplingParams, num_banned: int) -> None:
    wanted = None
    if params.logprobs:
        wanted, code = "log-probabilities", "no_logprobs"
    elif num_banned:
        wanted, code = "min_tokens with end tokens", "no_min_tokens"
    if wanted is not None:
        raise RequestError(f"{wanted} need an engine that was built with --dspark_plugin disable", code=code)
    if engine.greedy_only and not params.greedy:
        raise RequestError(
            "this engine was built with --acceptance greedy and serves requests of temperature 0 only",
            code="greedy_only",
        )


def _ended(request: ActiveRequest) -> bool:
    return request.cancelled or request.slot == NO_SLOT


def _choice(rows: RowResults, row: int) -> Choice:
    count = int(rows.emitted_len[row])
    return Choice(rows.tokens[row, :count].tolist(), [], int(rows.status[row]))


def _sampling(requests: Sequence[ActiveRequest]) -> RowSampling:
    params = [request.params for request in requests]
    bans = [request.ban_len > 0 for request in requests]
    return RowSampling(
        temperature=np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float32),
        seed=np.array([request.seed for request in requests], np.uint64),
        ban_until=np.array(
            [
                request.num_prompt + request.params.min_tokens if ban else 0
                for request, ban in zip(requests, bans, strict=True)
            ],
            np.int64,
        ),
        banned=tuple(() if r.banned_tokens is None else tuple(r.banned_tokens.tolist()) for r in requests),
    )


def _prompts(chunks: Chunks) -> PromptRows | None:
    if not chunks:
        return None
    tokens = [chunk.request.prompt[chunk.start : chunk.start + chunk.length] for chunk in chunks]
    completed = [chunk.request for chunk in chunks if chunk.completes]
    return PromptRows(
        token_ids=np.concatenate(tokens),
        row_lens=np.array([chunk.length for chunk in chunks], np.int64),
        write_indices=np.array([chunk.start for chunk in chunks], np.int64),
        first_slot=chunks[0].request.slot,
        max_new_tokens=np.array([request.remaining for request in completed], np.int64),
        sampling=_sampling(completed),
    )
