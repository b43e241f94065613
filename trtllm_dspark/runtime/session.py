"""Many requests, one engine: the public face of the runtime."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.engine.base import Engine, EngineLimits
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.errors import ConfigError, DeviceError, RequestError
from trtllm_dspark.runtime.active import ActiveRequest, make_active
from trtllm_dspark.runtime.batcher import Batcher
from trtllm_dspark.runtime.commit import commit, end_request
from trtllm_dspark.runtime.listener import RoundListener
from trtllm_dspark.runtime.outputs import FinishReason, RequestOutput
from trtllm_dspark.runtime.proposers import AcceptanceMode, ProposerFactory, keeps_tables, own_proposer
from trtllm_dspark.runtime.request import Request, check_request
from trtllm_dspark.runtime.rounds import choose_rounds_in_flight, make_rounds
from trtllm_dspark.runtime.scheduling import load_calibrator, load_cost_table, make_controller
from trtllm_dspark.runtime.slots import SlotTable
from trtllm_dspark.runtime.stats import SessionStats
from trtllm_dspark.runtime.stream_keys import StreamKeys
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.runtime.tokenizer import Tokenizer
from trtllm_dspark.speculation import (
    DEFAULT_SPECULATION,
    Calibration,
    Calibrator,
    ConfidenceRecorder,
    CostTable,
    LoadSource,
    SpeculationConfig,
    SpeculationController,
)
from trtllm_dspark.speculation.controller import FixedCalibrator, LoadLimits
from trtllm_dspark.speculation.shares import FairShares

logger = logging.getLogger(__name__)

_LAST_SESSIONS: dict[int, tuple[weakref.ref[Engine], weakref.ref[Session]]] = {}
"""By an engine's identity: the session that last added a request to it, whose caches are in its slots."""


class Session:
    """Serve requests from one engine, all of them in every round.

    Not thread-safe: one thread calls everything.

    Args:
        engine: target and drafter passes; closed by `close` only.
        tokenizer: turns ids into text; None gives ids only and refuses stop strings.
        speculation: which drafts are verified, as `SpeculationConfig` or its text form.
        acceptance: `rejection` (standard speculative sampling) or `coupled` (a seed gives the same text whatever else
            is in the batch and whatever is verified). Greedy requests compare argmaxes in both.
        eos_token_ids: tokens that end a request; None = the tokenizer's.
        cost_table: times of the engine's passes; None = measured when `speculation` needs them.
        calibration: of the confidence head, fixed or one that learns; None = confidences as the head gives them.
        recorder: told of every round's confidences and accepted lengths.
        load: limits that the load of the device sets; None = none.
        drafter: makes what proposes drafts; None = the engine's own drafter. `cost_table` and `calibration` are to be
            this drafter's.
        shares_drafter: whether other sessions draft with the same model: it stays loaded until `close`, used here or
            not.
        rounds_in_flight: rounds submitted before the oldest is collected; None = as many as the engine runs. One round
            at a time decides on the host, which log-probabilities, drafters outside the engine and listeners need.
        listener: sees every round.
        clock: seconds; for everything that is timed.

    Raises:
        ConfigError: the engine cannot speculate as asked.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        *,
        speculation: SpeculationConfig | str = "off",
        acceptance: AcceptanceMode = "rejection",
        eos_token_ids: Iterable[int] | None = None,
        cost_table: CostTable | None = None,
        calibration: Calibration | Calibrator | None = None,
        recorder: ConfidenceRecorder | None = None,
        load: LoadSource | None = None,
        drafter: ProposerFactory | None = None,
        shares_drafter: bool = False,
        rounds_in_flight: int | None = None,
        listener: RoundListener | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if acceptance not in ("rejection", "coupled"):
            raise ConfigError(f"acceptance '{acceptance}' is not known; use rejection or coupled")
        config = SpeculationConfig.parse(speculation) if isinstance(speculation, str) else speculation
        calibrator = FixedCalibrator(calibration) if isinstance(calibration, Calibration) else calibration
        self.stats = SessionStats(engine.limits.max_draft_len)
        timer = PassTimer(self.stats, clock)
        make = drafter or own_proposer(engine.limits)
        proposer = None if make is None or config.mode == "off" else make(engine, acceptance, timer)
        try:
            self._controller = make_controller(engine, proposer, config, cost_table, calibrator=calibrator, load=load)
        except BaseException:
            if proposer is not None and not shares_drafter:
                proposer.close()
            raise
        # What never drafts keeps nothing up.
        self._proposer = proposer if self._controller.draft_len else None
        self._unused = proposer if shares_drafter and self._proposer is None else None
        if proposer is not None and self._proposer is None and not shares_drafter:
            proposer.close()
        if self._proposer is not None:
            self.stats.set_draft_len(self._proposer.draft_len)
        if listener is not None:
            rounds_in_flight = 1
        depth = choose_rounds_in_flight(engine, rounds_in_flight, own_drafter=drafter is None)
        if depth > 1:
            # The device drafts: nothing has to keep up on the host.
            self._proposer = None
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer is None else tokenizer.eos_token_ids
        self.speculation = config
        self.acceptance = acceptance
        self._engine = engine
        self._cost_table = self._controller.cost_table or cost_table
        self._tokenizer = tokenizer
        self._draft_len = self._controller.draft_len
        learns = load is not None or not (calibrator is None or isinstance(calibrator, FixedCalibrator))
        learns |= self._proposer is not None and self._proposer.learns_across_requests
        self._keys = StreamKeys(config, acceptance, engine.limits, draft_len=self._draft_len, learns=learns)
        self._eos_token_ids = tuple(eos_token_ids)
        for token in self._eos_token_ids:
            if not 0 <= token < engine.limits.vocab_size:
                raise ConfigError(
                    f"end-of-sequence token {token} is outside the vocabulary of {engine.limits.vocab_size} tokens; "
                    "build the engine with the model's own tokenizer"
                )
        self._calibration = calibration
        self._load = load
        self._drafter = drafter
        self._clock = clock
        self._listener = listener
        self._rounds_in_flight = rounds_in_flight
        self._rounds = make_rounds(
            engine,
            self._proposer,
            self._controller,
            acceptance,
            timer,
            rounds_in_flight=depth,
            recorder=recorder,
            listener=listener,
        )
        self._batcher: Batcher[ActiveRequest] = Batcher(engine.limits.max_num_tokens)
        self._shares = FairShares(self._draft_len)
        self._slots = SlotTable(engine.limits.max_batch_size)
        self._requests: dict[str, ActiveRequest] = {}
        self._cancelled: list[ActiveRequest] = []
        self._outputs: list[RequestOutput] = []
        self._in_flight: deque[Any] = deque()
        self._held_back = False
        self._failure: DeviceError | None = None

    @staticmethod
    def open(
        engine_dir: str | Path,
        *,
        num_threads: int = 2,
        speculation: SpeculationConfig | str = DEFAULT_SPECULATION,
        acceptance: AcceptanceMode = "rejection",
        drafter: ProposerFactory | None = None,
        listener: RoundListener | None = None,
        load: LoadSource | None = None,
        online_calibration: bool = False,
        kernel_library: str | Path | None = None,
    ) -> Session:
        """Load an engine directory and its tokenizer into a session; `close` releases the engine.

        The directory's cost table and calibration are those of its own drafter: with another `drafter` (`engine+ngram`
        is none) they are left aside. With `online_calibration` the calibration starts from the stored one and follows
        what is observed.

        Raises:
            EngineError: the directory cannot be used.
            ConfigError: the engine cannot speculate as asked.
        """
        if online_calibration and drafter is not None:
            raise ConfigError("online calibration is of the engine's own drafter alone; leave one of the two out")
        from trtllm_dspark.engine import load_engine

        engine = load_engine(engine_dir, num_threads=num_threads, kernel_library=kernel_library)
        try:
            directory = open_engine_dir(engine_dir, verify_hashes=False)
            own = keeps_tables(drafter)
            return Session(
                engine,
                Tokenizer.open(directory),
                speculation=speculation,
                acceptance=acceptance,
                cost_table=load_cost_table(directory, engine, num_threads=num_threads) if own else None,
                calibration=load_calibrator(directory, online=online_calibration) if own else None,
                drafter=drafter,
                listener=listener,
                load=load,
            )
        except BaseException:
            engine.close()
            raise

    def sibling(self, *, speculation: SpeculationConfig | str) -> Session:
        """Return another session over the same engine, tables and tokenizer; only one may be busy at a time."""
        return Session(
            self._engine,
            self._tokenizer,
            speculation=speculation,
            acceptance=self.acceptance,
            eos_token_ids=self._eos_token_ids,
            cost_table=self._cost_table,
            calibration=self._calibration,
            load=self._load,
            drafter=self._drafter,
            shares_drafter=True,
            rounds_in_flight=self._rounds_in_flight,
            clock=self._clock,
        )

    def close(self) -> None:
        """Release the engine and what drafts for it; unfinished requests are lost."""
        for proposer in (self._proposer, self._unused):
            if proposer is not None:
                proposer.close()
        self._engine.close()

    @property
    def limits(self) -> EngineLimits:
        """Shapes the engine was built for."""
        return self._engine.limits

    @property
    def cost_table(self) -> CostTable | None:
        """Times the session knows; None where its speculation needs none and none were given."""
        return self._cost_table

    @property
    def controller(self) -> SpeculationController:
        """Decides what rounds draft and verify; its `state` holds numbers for metrics."""
        return self._controller

    @property
    def calibration(self) -> Calibration | Calibrator | None:
        """Calibration of the confidence head, fixed or one that learns."""
        return self._calibration

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer the session decodes with."""
        return self._tokenizer

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._batcher)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._slots)

    @property
    def num_free_slots(self) -> int:
        """Slots a request could take."""
        return self._slots.num_free

    @property
    def failure(self) -> DeviceError | None:
        """Why the engine failed; such a session takes no more requests."""
        return self._failure

    @property
    def held_back(self) -> bool:
        """Whether the last step computed nothing: nobody is unfinished, or the load lets no request start."""
        return self._held_back

    def has_unfinished(self) -> bool:
        """Return whether a request is waiting or running, or an output was not collected yet."""
        return bool(self._requests or self._outputs)

    def add(self, request: Request) -> None:
        """Queue a request; it joins the next round that has a slot for it.

        Raises:
            RequestError: the engine cannot serve it, or its id is in use.
            DeviceError: the engine has failed.
            RuntimeError: another session over this engine has unfinished requests, whose caches would be overwritten.
        """
        if self._failure is not None:
            raise DeviceError(f"the engine has failed ({self._failure}); open it again")
        if request.request_id in self._requests:
            raise RequestError(
                f"request id '{request.request_id}' is in use; choose another", code="duplicate_request_id"
            )
        if self._tokenizer is None and request.params.stop:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids", code="invalid_stop")
        check_request(request, self.limits)
        active = make_active(
            request,
            seed=self._keys.key(request.params.seed),
            now=self._clock(),
            max_seq_len=self.limits.max_seq_len,
            block_len=self.stats.max_draft_len,
            max_draft_len=self._draft_len,
            eos_token_ids=self._eos_token_ids,
            detokenizer=None if self._tokenizer is None else self._tokenizer.detokenizer(),
        )
        self._rounds.check(request.params, 0 if active.banned_tokens is None else active.banned_tokens.size)
        self._take_engine()
        self._requests[request.request_id] = active
        self._batcher.add(active)

    def _take_engine(self) -> None:
        engine = self._engine
        known, session = _LAST_SESSIONS.get(id(engine), (None, None))
        other = session() if known is not None and session is not None and known() is engine else None
        if other is self:
            return
        if other is not None and (other._requests or other._in_flight):
            raise RuntimeError(
                f"another session over this engine is busy ({len(other._requests)} unfinished requests); step it until "
                "they have ended, cancelled ones too, or load the engine a second time"
            )
        key = id(engine)
        known = weakref.ref(engine, lambda _: _LAST_SESSIONS.pop(key, None))
        _LAST_SESSIONS[key] = known, weakref.ref(self)

    def cancel(self, request_id: str) -> bool:
        """End a request before the next round; return whether it was unfinished."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if not request.cancelled:
            request.cancelled = True
            self._cancelled.append(request)
        return True

    def step(self) -> list[RequestOutput]:
        """Run one round and return what every request gained in it; with rounds in flight, in the oldest of them."""
        submitted = self.submit()
        self._held_back = not (submitted or self._in_flight)
        if submitted and len(self._in_flight) < self._rounds.rounds_in_flight:
            return self._take_outputs()
        return self.collect()

    def submit(self) -> bool:
        """Start a round: admit, draft, schedule, verify; return whether there was anything to do.

        Raises:
            RuntimeError: as many rounds are in flight as the engine runs.
        """
        if len(self._in_flight) >= self._rounds.rounds_in_flight:
            raise RuntimeError("the round before was not collected; call collect() first")
        started = self._clock()
        self._end_cancelled()
        submitted = None
        try:
            submitted = self._submit_round()
        except Exception as error:
            self._fail(error)
        if submitted is not None:
            self._in_flight.append(submitted)
        self.stats.round_s += self._clock() - started
        return submitted is not None

    def _submit_round(self) -> Any:
        for move in self._slots.compact():
            self.stats.slot_copies += 1
            self._rounds.move(move.request, move.source, move.destination)
        decoding = self._slots.decoding
        limits = self._controller.limits()
        plan = self._batcher.plan(
            num_decoding=len(decoding),
            # By number, not by what they may verify: nobody's options move what is left for the others.
            drafts_wanted=len(decoding) * self._draft_len,
            prefilling=self._slots.prefilling,
            num_free=self._admissible(limits),
        )
        caps = np.array([request.draft_cap for request in decoding], np.int64)
        interactive = np.array([request.params.latency_class == "interactive" for request in decoding], np.bool_)
        budget = plan.draft_budget if limits.verify_budget is None else min(plan.draft_budget, limits.verify_budget)
        caps = self._shares.limit(caps, interactive, budget)
        for request in plan.admitted:
            self._slots.place(request)
            request.stats.scheduled = self._clock()
        return self._rounds.submit(decoding, caps, plan.draft_budget, plan.chunks)

    def _admissible(self, limits: LoadLimits) -> int:
        """Return how many requests may get a slot now."""
        if not limits.admit:
            return 0
        free = self._slots.num_free
        return free if limits.max_requests is None else max(0, min(free, limits.max_requests - len(self._slots)))

    def collect(self) -> list[RequestOutput]:
        """Finish the oldest submitted round: accept and commit; return one output a request that gained something."""
        started = self._clock()
        try:
            if self._in_flight:
                self._collect_round(self._in_flight.popleft())
            while self._in_flight and not self._requests:
                # Nobody is left to gain anything; an idle session holds no round of its engine.
                self._collect_round(self._in_flight.popleft())
        except Exception as error:
            self._fail(error)
        self.stats.round_s += self._clock() - started
        return self._take_outputs()

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _collect_round(self, finished: Any) -> None:
        self.stats.rounds += 1
        for emitted in self._rounds.collect(finished):
            request = emitted.request
            if request.cancelled:
                continue
            output = commit(emitted, now=self._clock(), stats=self.stats)
            if self._listener is not None:
                self._listener.committed(request, output)
            if self._proposer is not None and not output.finished:
                self._proposer.committed(request, output.new_token_ids)
            self._deliver(request, output)
        self._end_cancelled()

    def _end_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for request in cancelled:
            self._end(request, "cancelled")

    def _fail(self, error: Exception) -> None:
        """End every request: after a failed pass nothing is known about the caches."""
        logger.error("the engine failed: %s", error, exc_info=error)
        first_line = (str(error).splitlines() or [""])[0]
        self._failure = (
            error if isinstance(error, DeviceError) else DeviceError(f"{type(error).__name__}: {first_line}")
        )
        self._in_flight.clear()
        self._cancelled.clear()
        for request in list(self._requests.values()):
            self._end(request, "error", error=f"the engine failed: {self._failure}", error_code="engine_failed")

    def _end(
        self, request: ActiveRequest, reason: FinishReason, *, error: str | None = None, error_code: str | None = None
    ) -> None:
        if request in self._batcher:
            self._batcher.discard(request)
        output = end_request(request, reason, error=error, error_code=error_code)
        if self._listener is not None:
            self._listener.committed(request, output)
        self._deliver(request, output)

    def _deliver(self, request: ActiveRequest, output: RequestOutput) -> None:
        self._outputs.append(output)
        if output.finished:
            self._slots.release(request)
            self._controller.forget(request)
            self._rounds.forget(request)
            if self._proposer is not None:
                self._proposer.forget(request)
            del self._requests[request.request.request_id]
            reason = output.finish_reason or ""
            self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
