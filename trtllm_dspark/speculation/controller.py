"""Decide every round from plain data, and learn from it afterwards.

The controller knows no engine, no clock and no request object: requests are hashable keys, durations are passed in.
Sessions and simulators drive it alike: `plan`, then the draft where the plan wants one, `verify_lens`, the round,
`observe`; several rounds may lie between a plan and its outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation.adaptive import AdaptivePolicy
from trtllm_dspark.speculation.calibration import Calibration
from trtllm_dspark.speculation.config import SpeculationConfig
from trtllm_dspark.speculation.cost_table import CostTable
from trtllm_dspark.speculation.drift import Correction, RoundCosts
from trtllm_dspark.speculation.round_counters import RoundCounters
from trtllm_dspark.speculation.scheduler import PrefixScheduler

logger = logging.getLogger(__name__)

Reason = Literal["off", "idle", "load", "bypass", "measure", "probe", "speculate"]
"""Why a round drafts or not: `off` never does, `idle` no request could use a draft, `load` the load forbids it,
`bypass` plain decoding is as fast, `measure` times a plain round among drafting ones; `probe` is a look whether drafts
pay by now, `speculate` they do."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """What the load of the device allows now; made of past samples only.

    Attributes:
        cost_scale: at least 1; factor on what tokens beyond one a request add to a pass.
        verify_budget: drafts verified in a round at most, None = no limit.
        max_requests: requests that may run at once, None = no limit.
        admit: whether new requests may start.
        reason: why, for people; empty when nothing is wrong.
    """

    cost_scale: float = 1.0
    verify_budget: int | None = None
    max_requests: int | None = None
    admit: bool = True
    reason: str = ""


class LoadSource(Protocol):
    """Where load limits come from."""

    def limits(self) -> LoadLimits:
        """Return the limits of the coming round; cheap, called once a round."""
        ...


class Calibrator(Protocol):
    """Calibration of the confidence head: confidence = sigmoid(logit / temperature + bias)."""

    def arrays(self, num_positions: int) -> tuple[FloatArray, FloatArray]:
        """Return temperatures and biases of the first positions, [num_positions] float32 each."""
        ...

    def observe(self, confidence: FloatArray, verify_len: IntArray, accepted: IntArray) -> None:
        """Learn from blocks of past rounds.

        Args:
            confidence: [N, gamma] float32 as the head gives them, without calibration.
            verify_len: [N] int64 drafts verified.
            accepted: [N] int64 drafts accepted, at most `verify_len`.
        """
        ...


class RoundPlan(NamedTuple):
    """What a round does; nothing in it depends on the round's own drafts.

    One is made every round: a named tuple takes a third of a frozen dataclass's time.

    Attributes:
        reason: why.
        caps: [R] int64, drafts of each request that may be verified; where all are 0 nothing is drafted.
        verify_budget: drafts of all requests that may be verified.
        temperature: [gamma] float32 calibration for this round's confidences, or None.
        bias: [gamma] float32, or None.
        cost_scale: factor the load puts on what tokens beyond one a request cost.
        num_drafting: requests with a cap above 0.
    """

    reason: Reason
    caps: IntArray
    verify_budget: int
    temperature: FloatArray | None = None
    bias: FloatArray | None = None
    cost_scale: float = 1.0
    num_drafting: int = 0

    @property
    def drafts(self) -> bool:
        """Whether the block, the chain and the scheduler run."""
        return self.num_drafting > 0


class RoundOutcome(NamedTuple):
    """What became of a round; a named tuple as `RoundPlan`.

    Attributes:
        plan: what had been decided.
        requests: keys of the R decoding requests.
        depth: tokens cached before each row, on average.
        verify_len: [R] int64 drafts verified.
        accepted: [R] int64 drafts accepted, -1 for a request whose logits were refused.
        confidence: [R, draft_len] float32 as `verify_lens` got them, or None.
        drafted: [R] bool, requests with a row in `confidence`.
        draft_us: microseconds of absorbing, the block, the chain and the confidences; None where it did not run or
            was not timed.
        verify_us: microseconds of the target pass and the acceptance; None where it was not timed.
        round_us: microseconds of all of that together, where its parts are not timed; else None.
    """

    plan: RoundPlan
    requests: Sequence[Hashable]
    depth: int
    verify_len: IntArray
    accepted: IntArray
    confidence: FloatArray | None
    drafted: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    draft_us: float | None = None
    verify_us: float | None = None
    round_us: float | None = None


@dataclass(frozen=True, slots=True)
class ControllerState:
    """Numbers for metrics and logs.

    Attributes:
        reason: of the last plan.
        bypassed: whether the adaptive policy decodes plainly.
        gain: mean over the requests of the predicted rate of speculating over that of plain decoding, minus 1, each as
            if all were like it; None where unknown.
        threshold: mean over the requests of the least survival a draft needs; None outside `adaptive`.
        accepted_ratio: drafts accepted over drafts the confidences promised, recently; 1 = as promised.
        correction: what the cost table is multiplied with.
        beside_us: microseconds the host works more beside the passes in a round with drafts; 0 while unknown.
        predicted_us: time that was predicted for the last observed round; None without a cost table.
        measured_us: time it took; None where it was not timed.
        load: limits of the last plan.
    """

    reason: Reason = "idle"
    bypassed: bool = False
    gain: float | None = None
    threshold: float | None = None
    accepted_ratio: float = 1.0
    correction: Correction = field(default_factory=Correction)
    beside_us: float = 0.0
    predicted_us: float | None = None
    measured_us: float | None = None
    load: LoadLimits = field(default_factory=LoadLimits)


class FixedCalibrator:
    """A calibration that learns nothing.

    Args:
        calibration: the parameters.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._arrays: dict[int, tuple[FloatArray, FloatArray]] = {}

    def arrays(self, num_positions: int) -> tuple[FloatArray, FloatArray]:
        """Return temperatures and biases of the first positions; the same arrays every time."""
        found = self._arrays.get(num_positions)
        if found is None:
            found = self._arrays[num_positions] = self._calibration.arrays(num_positions)
        return found

    def observe(self, confidence: FloatArray, verify_len: IntArray, accepted: IntArray) -> None:
        """Learn nothing."""


class SpeculationController:
    """Decide what a round drafts and verifies, under one `--speculation` mode.

    Args:
        config: the mode.
        max_draft_len: gamma of the engine; 0 = no drafter, then only `off` is possible.
        cost_table: times of the engine's passes, for modes that need them; where it is given, predicted and measured
            times are compared in every mode.
        calibrator: of the confidence head; None = confidences as the head gives them.
        load: limits of the device; None = none.

    Attributes:
        draft_len: drafts of one request verified in a round at most; 0 = this mode never speculates.
        counters: of all rounds that were observed.

    Raises:
        ConfigError: the mode asks for more drafts than the block has, or needs a cost table.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        *,
        max_draft_len: int,
        cost_table: CostTable | None = None,
        calibrator: Calibrator | None = None,
        load: LoadSource | None = None,
    ) -> None:
        self.config = config
        self.cost_table = cost_table
        self._calibrator = calibrator
        self._learns = not (calibrator is None or isinstance(calibrator, FixedCalibrator))
        self._load = load
        self._limits = LoadLimits()
        self._reason: Reason = "idle"
        self._predicted_us: float | None = None
        self._measured_us: float | None = None
        self._scheduler: PrefixScheduler | None = None
        self._adaptive: AdaptivePolicy | None = None
        self._costs = (
            None if cost_table is None or not max_draft_len else RoundCosts(cost_table, max_draft_len=max_draft_len)
        )
        if config.mode == "adaptive":
            if self._costs is None:
                raise ConfigError("speculation 'adaptive' needs a cost table; run trtllm-dspark profile")
            self._adaptive = AdaptivePolicy(self._costs, max_draft_len=max_draft_len)
        elif config.mode != "off":
            self._scheduler = PrefixScheduler(config, max_draft_len=max_draft_len, cost_table=cost_table)
        if self._scheduler is not None:
            self.draft_len = self._scheduler.draft_len
        else:
            self.draft_len = 0 if self._adaptive is None else max_draft_len
        self.counters = RoundCounters(self.draft_len)

    @property
    def needs_confidence(self) -> bool:
        """Whether `verify_lens` wants confidences."""
        return self.config.needs_confidence

    @property
    def adapts(self) -> bool:
        """Whether rounds may decode plainly for a while: contexts then need to catch up only before a draft."""
        return self._adaptive is not None

    @property
    def bypassed(self) -> bool:
        """Whether rounds decode plainly until a probe promises a gain."""
        return self._adaptive is not None and self._adaptive.bypassed

    def limits(self) -> LoadLimits:
        """Read the load; the next plan uses what this returns."""
        if self._load is not None:
            self._limits = self._load.limits()
        return self._limits

    def plan(self, requests: Sequence[Hashable], *, caps: IntArray, token_budget: int, depth: int) -> RoundPlan:
        """Decide whether a round drafts; from past rounds and the load read last.

        Args:
            requests: keys of the R decoding requests, in slot order.
            caps: [R] int64, drafts of each that may be verified; 0 for one that does not speculate.
            token_budget: drafts that fit into the round.
            depth: tokens cached before each row, on average.
        """
        limits = self._limits
        budget = token_budget if limits.verify_budget is None else min(token_budget, limits.verify_budget)
        caps = np.minimum(caps, self.draft_len)
        num_drafting = np.count_nonzero(caps)
        if self.draft_len == 0:
            self._reason = "off"
        elif limits.verify_budget is not None and limits.verify_budget <= 0:
            self._reason = "load"
        elif not num_drafting:
            self._reason = "idle"
        elif budget <= 0:
            self._reason = "load"
        elif self._adaptive is not None:
            self._reason, caps = self._adaptive.plan(requests, caps, depth, limits.cost_scale)
            num_drafting = np.count_nonzero(caps)
        else:
            self._reason = "speculate"
        if self._reason not in ("speculate", "probe"):
            return RoundPlan(self._reason, np.zeros(len(caps), np.int64), budget, cost_scale=limits.cost_scale)
        temperature = bias = None
        if self._calibrator is not None:
            temperature, bias = self._calibrator.arrays(self.draft_len)
        return RoundPlan(self._reason, caps, budget, temperature, bias, limits.cost_scale, num_drafting)

    def verify_lens(
        self,
        plan: RoundPlan,
        requests: Sequence[Hashable],
        *,
        caps: IntArray,
        confidence: FloatArray | None,
        depth: int,
    ) -> IntArray:
        """Return [R] int64 drafts to verify, 0..caps, once the drafts are known.

        Whether draft k is verified depends on drafts before k and on past rounds only, so that the output law stays
        the target's (docs/losslessness.md).

        Args:
            plan: of this round.
            requests: as `plan` got them.
            caps: [R] int64, at most the plan's; less where a draft cannot be used.
            confidence: [R, draft_len] float32, calibrated by the plan's arrays; None in modes that need none.
            depth: tokens cached before each row, on average.
        """
        if not np.count_nonzero(caps):
            return np.zeros(len(requests), np.int64)
        if self._adaptive is not None and confidence is not None:
            return self._adaptive.verify_lens(requests, caps=caps, confidence=confidence, budget=plan.verify_budget)
        if self._scheduler is None:
            return np.zeros(len(requests), np.int64)
        return self._scheduler.verify_lens(
            requests,
            caps=caps,
            confidence=confidence,
            token_budget=plan.verify_budget,
            depth=depth,
            load_scale=plan.cost_scale,
        )

    def thresholds(self, requests: Sequence[Hashable]) -> FloatArray:
        """Return [R] float32 survivals drafts need in mode `adaptive`, for engines that choose lengths themselves."""
        if self._adaptive is None:
            return np.ones(len(requests), np.float32)
        return self._adaptive.thresholds(requests)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round: calibration, acceptance, times."""
        self._observe_times(outcome)
        self.counters.add(
            outcome.plan.caps, outcome.drafted, outcome.verify_len, outcome.accepted, outcome.plan.verify_budget
        )
        confidence, verified, accepted = outcome.confidence, outcome.verify_len, outcome.accepted
        if confidence is None:
            return
        if self._calibrator is not None and self._learns:
            places = (outcome.drafted & (accepted >= 0)).nonzero()[0]
            if len(places):
                self._calibrator.observe(
                    _uncalibrated(confidence[places], outcome.plan), verified[places], accepted[places]
                )
        if self._adaptive is not None:
            self._adaptive.observe(outcome.requests, outcome.drafted, confidence, verified, accepted)

    def observe_beside(self, drafts: bool, measured_us: float) -> None:
        """Learn what a round took beside what its outcome times; rounds with drafts give the host more to do."""
        if self._costs is not None:
            self._costs.observe_beside(drafts, measured_us)

    def forget(self, request: Hashable) -> None:
        """Drop what is kept about a request that has ended, once its last round was observed."""
        if self._scheduler is not None:
            self._scheduler.forget(request)
        if self._adaptive is not None:
            self._adaptive.forget(request)

    @property
    def state(self) -> ControllerState:
        """Numbers for metrics and logs."""
        adaptive = self._adaptive
        return ControllerState(
            reason=self._reason,
            bypassed=self.bypassed,
            gain=None if adaptive is None else adaptive.gain,
            threshold=None if adaptive is None else adaptive.threshold,
            accepted_ratio=1.0 if adaptive is None else adaptive.accepted_ratio,
            correction=Correction() if self._costs is None else self._costs.correction,
            beside_us=0.0 if self._costs is None else self._costs.beside_us,
            predicted_us=self._predicted_us,
            measured_us=self._measured_us,
            load=self._limits,
        )

    def _observe_times(self, outcome: RoundOutcome) -> None:
        if self._costs is None or not len(outcome.requests):
            return
        measured = outcome.round_us if outcome.verify_us is None else outcome.verify_us
        if measured is None:
            if outcome.plan.drafts:
                self._costs.observe_untimed()
            return
        count, depth, scale = len(outcome.requests), outcome.depth, outcome.plan.cost_scale
        tokens, drafted = count + int(np.add.reduce(outcome.verify_len)), _span(outcome.drafted) or count
        if outcome.verify_us is None and outcome.plan.drafts:
            predicted = self._costs.observe_round(count, tokens, drafted, depth, measured, cost_scale=scale)
        else:
            # Without drafts the target pass is the whole round.
            predicted = self._costs.observe_verify(count, tokens, depth, measured, cost_scale=scale)
            if outcome.draft_us is not None:
                predicted += self._costs.observe_draft(drafted, depth, outcome.draft_us)
                measured += outcome.draft_us
        self._predicted_us, self._measured_us = predicted, measured
        self.counters.add_times(predicted, measured)


def _span(drafted: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int:
    """Return the rows from the first to the last that drafts: a draft pass runs over all of them."""
    rows = drafted.nonzero()[0]
    return rows.item(-1) - rows.item(0) + 1 if rows.size else 0


def _uncalibrated(confidence: FloatArray, plan: RoundPlan) -> FloatArray:
    """Return the confidences the head gave before calibration."""
    if plan.temperature is None or plan.bias is None:
        return confidence
    clipped = np.clip(confidence.astype(np.float64), 1e-7, 1 - 1e-7)
    logit = (np.log(clipped / (1 - clipped)) - plan.bias) * plan.temperature
    return np.asarray(0.5 * (1 + np.tanh(0.5 * logit)), np.float32)


__all__ = [
    "Calibrator",
    "ControllerState",
    "FixedCalibrator",
    "LoadLimits",
    "LoadSource",
    "Reason",
    "RoundOutcome",
    "RoundPlan",
    "SpeculationController",
]
