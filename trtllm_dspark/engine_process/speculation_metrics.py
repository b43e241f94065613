"""What sessions decide and learn about drafts, as metrics; and what the load of the GPU makes of it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.runtime.load_control import LoadControl
from trtllm_dspark.runtime.session import Session
from trtllm_dspark.serving.metric_schema import LOAD_COUNTERS
from trtllm_dspark.speculation.calibration import Calibration
from trtllm_dspark.speculation.online_calibration import OnlineCalibration

_PERIOD_S = 0.25
_TRIM_ROUNDS = 256


class SpeculationMetrics:
    """Copy counters and states of the sessions at most every 0.25 s; nobody scrapes faster.

    Counters add up over the sessions there ever were; gauges are those of the serving one, which is the first.

    Args:
        metrics: where they live.
        load: what limits the sessions, or None.
    """

    def __init__(self, metrics: EngineMetrics, load: LoadControl | None = None) -> None:
        self._metrics = metrics
        self._load = load
        self._next = 0.0
        self._counted: dict[tuple[int, str, str], float] = {}
        self._sessions: list[Session] = []
        self._trimmed: deque[tuple[int, int]] = deque(maxlen=_TRIM_ROUNDS)

    def update(self, sessions: Sequence[Any]) -> None:
        """Set everything from the sessions, the serving one first; others than `runtime.Session` show nothing."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PERIOD_S
        shown = [session for session in sessions if isinstance(session, Session)]
        self._forget(shown)
        for session in shown:
            self._count(session)
        if shown:
            self._show(shown[0])
        if self._load is not None:
            self._show_load(self._load)

    def _forget(self, sessions: list[Session]) -> None:
        """Drop what was counted of sessions that are gone: another may get the same identity."""
        if sessions != self._sessions:
            alive = {id(owner) for owner in (*sessions, self._load)}
            self._counted = {key: value for key, value in self._counted.items() if key[0] in alive}
            self._sessions = sessions

    def _count(self, session: Session) -> None:
        counters, stats = session.controller.counters, session.stats
        stages = {**counters.by_position(), "committed": stats.acceptance.accepted_per_position}
        for stage, counts in stages.items():
            for position, count in enumerate(counts, start=1):
                self._add(session, "dspark_drafts_at_position", count, stage=stage, position=str(position))
        for reason, count in stats.plans.items():
            self._add(session, "dspark_speculation_rounds", count, reason=reason)
        self._add(session, "dspark_planned_seconds", counters.predicted_us * 1e-6)
        self._add(session, "dspark_measured_seconds", counters.measured_us * 1e-6)
        while counters.recent:
            budget, verified, drafted = counters.recent.popleft()
            self._metrics.observe("dspark_round_draft_budget", budget)
            self._metrics.observe("dspark_round_drafts_verified", verified)
            self._trimmed.append((verified, drafted))
        if isinstance(session.calibration, OnlineCalibration):
            status = session.calibration.status
            self._add(session, "dspark_calibration_updates", status.updates)
            self._add(session, "dspark_calibration_rollbacks", status.rollbacks)

    def _add(self, owner: object, name: str, total: float, **labels: str) -> None:
        """Increase a counter by what its owner's has grown since it was read last."""
        key = (id(owner), name, ",".join(labels.values()))
        grown = total - self._counted.get(key, 0.0)
        if grown > 0:
            self._counted[key] = total
            self._metrics.add(name, grown, **labels)

    def _show(self, session: Session) -> None:
        state, metrics = session.controller.state, self._metrics
        metrics.set("dspark_speculation_bypassed", float(state.bypassed))
        metrics.set("dspark_speculation_kept_ratio", state.accepted_ratio)
        for name, value in (("gain", state.gain), ("threshold", state.threshold)):
            if value is not None:
                metrics.set(f"dspark_speculation_{name}", value)
        for part in ("base", "marginal", "draft"):
            metrics.set("dspark_cost_correction", getattr(state.correction, part), part=part)
        metrics.set("dspark_draft_host_seconds", state.beside_us * 1e-6)
        if self._trimmed:
            verified, drafted = (sum(column) for column in zip(*self._trimmed, strict=True))
            metrics.set("dspark_trim_ratio", 1.0 - verified / drafted)
        self._show_calibration(session.calibration)

    def _show_calibration(self, calibration: object) -> None:
        metrics = self._metrics
        if isinstance(calibration, OnlineCalibration):
            status, calibration = calibration.status, calibration.calibration
            metrics.set("dspark_calibration_drift", float(status.drift))
            for which, error in (("in_force", status.error), ("stored", status.error_stored)):
                if not math.isnan(error):
                    metrics.set("dspark_calibration_error", error, calibration=which)
        if isinstance(calibration, Calibration):
            pairs = zip(calibration.temperature, calibration.bias, strict=True)
            for position, (temperature, bias) in enumerate(pairs, start=1):
                metrics.set("dspark_calibration_temperature", temperature, position=str(position))
                metrics.set("dspark_calibration_bias", bias, position=str(position))

    def _show_load(self, load: LoadControl) -> None:
        metrics, limits = self._metrics, load.limits()
        metrics.set("dspark_limit_cost_scale", limits.cost_scale)
        metrics.set("dspark_limit_requests", load.allowed())
        budget = limits.verify_budget
        metrics.set("dspark_limit_verify_budget", load.max_drafts if budget is None else budget)
        for name, value in load.metrics().items():
            if name in LOAD_COUNTERS:
                self._add(load, name, value)
            else:
                metrics.set(name, value)
