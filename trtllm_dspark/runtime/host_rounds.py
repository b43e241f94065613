"""Rounds of an engine that takes and gives host arrays: one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_dspark.engine.base import Engine, IntArray
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.proposers.base import Chunks, Proposer
from trtllm_dspark.runtime.round import DecodePass, Emitted, PrefillPass, RoundSteps
from trtllm_dspark.runtime.sampling_params import SamplingParams
from trtllm_dspark.runtime.timing import PassTimer


@dataclass(frozen=True, slots=True)
class HostPass:
    """A round whose passes have run and whose tokens are not decided."""

    decode: DecodePass | None
    prefill: PrefillPass | None


class HostRounds:
    """Submit and collect the rounds of one session; `DeviceRounds` is its counterpart.

    Args:
        engine: target and drafter passes.
        steps: the steps of a round.
        proposer: told when requests move.
        timer: of the session.
    """

    rounds_in_flight = 1

    def __init__(self, engine: Engine, steps: RoundSteps, proposer: Proposer | None, timer: PassTimer) -> None:
        self._engine, self._steps, self._proposer, self._timer = engine, steps, proposer, timer
        self._submit_s = 0.0

    def check(self, params: SamplingParams, num_banned: int) -> None:
        """Refuse nothing: logits are on the host."""

    def submit(
        self, requests: list[ActiveRequest], caps: IntArray, token_budget: int, chunks: Chunks
    ) -> HostPass | None:
        """Draft, schedule, verify and prefill; None where there is nothing to do.

        Args:
            requests: decoding requests in slot order.
            caps: [R] drafts of each that may be verified.
            token_budget: drafts that fit into the round.
            chunks: prompt chunks in slot order.
        """
        started = self._timer.clock()
        plan = self._steps.plan(requests, caps, token_budget)
        draft = self._steps.draft(requests, plan)
        verify_len = self._steps.schedule(requests, plan, draft)
        decode = self._steps.verify(requests, plan, draft, verify_len)
        prefill = self._steps.prefill(chunks)
        self._submit_s = self._timer.clock() - started
        return None if decode is None and prefill is None else HostPass(decode, prefill)

    def collect(self, finished: HostPass) -> list[Emitted]:
        """Decide the tokens of the round."""
        started = self._timer.clock()
        emitted = self._steps.accept(finished.decode, finished.prefill)
        self._steps.observe_whole(finished.decode, finished.prefill, self._submit_s + self._timer.clock() - started)
        return emitted

    def move(self, request: ActiveRequest, source: int, destination: int) -> None:
        """Copy what is cached of a request to another slot."""
        self._timer.on_engine(
            self._engine.copy_slot,
            source,
            destination,
            num_tokens=request.num_cached,
            num_context=request.num_context,
        )
        if self._proposer is not None:
            self._proposer.moved(request, source, destination)

    def forget(self, request: ActiveRequest) -> None:
        """Drop what is kept about a request that has ended."""
