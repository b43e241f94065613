"""Every number about drafts and load that sessions know arrives under its declared name."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_engine import FakeEngine, collect_outputs

from trtllm_dspark.engine_process.metrics import EngineMetrics, Snapshot
from trtllm_dspark.engine_process.speculation_metrics import SpeculationMetrics
from trtllm_dspark.load import LoadMonitor, Sample, metric_names
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.load_control import LoadControl
from trtllm_dspark.serving.metric_schema import FAMILIES, LOAD_COUNTERS, Kind, parse_series_key
from trtllm_dspark.speculation import Calibration, CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape
from trtllm_dspark.speculation.online_calibration import OnlineCalibration, OnlineConfig

GAMMA = 4
STAGES = ("drafted", "admitted", "verified", "accepted", "committed")


def table() -> CostTable:
    verify = {VerifyShape(r, r * k, k, 16): 1000.0 + 20.0 * r * k for r in (1, 2, 4) for k in range(1, GAMMA + 2)}
    return CostTable(verify, {DraftShape(r, 16): 50.0 for r in (1, 2, 4)})


def served(session: Session, count: int = 12, **options: Any) -> Session:
    """Run requests to their end; some stop inside a block."""
    for index in range(count):
        params = SamplingParams(**{"max_tokens": 40 + index, "stop_token_ids": [7], **options})
        session.add(Request(str(index), [3, index], params))
    collect_outputs(session)
    return session


def snapshot(*sessions: Session, load: LoadControl | None = None) -> Snapshot:
    metrics = EngineMetrics()
    SpeculationMetrics(metrics, load).update(sessions)
    return metrics.snapshot()


def by_labels(series: dict[str, float], *names: str) -> dict[tuple[str, ...], float]:
    return {tuple(parse_series_key(key)[name] for name in names): value for key, value in series.items()}


def test_positions_by_stage_add_up_and_fall_from_stage_to_stage() -> None:
    session = served(Session(FakeEngine(max_num_tokens=64), None, speculation="threshold:0.3"), 24)
    found = by_labels(snapshot(session)["dspark_drafts_at_position"], "stage", "position")
    table_of = {stage: [found.get((stage, str(k)), 0.0) for k in range(1, GAMMA + 1)] for stage in STAGES}
    for earlier, later in zip(STAGES, STAGES[1:], strict=False):
        assert all(a >= b for a, b in zip(table_of[earlier], table_of[later], strict=True)), (earlier, later)
    counts = session.stats.acceptance
    assert sum(table_of["drafted"]) == counts.drafted
    assert table_of["verified"] == counts.verified_per_position
    assert table_of["committed"] == counts.accepted_per_position
    # Stops cut blocks whose drafts were accepted, and the last rounds may emit less than a block.
    assert sum(table_of["accepted"]) > sum(table_of["committed"])
    assert table_of["admitted"][-1] < table_of["drafted"][-1]


def test_histograms_of_budgets_and_the_trim_ratio() -> None:
    session = served(Session(FakeEngine(max_num_tokens=64), None, speculation="fixed:2"))
    counts = session.stats.acceptance
    found = snapshot(session)
    assert found["dspark_round_drafts_verified_sum"][""] == counts.verified
    assert found["dspark_round_draft_budget_sum"][""] >= counts.verified
    assert found["dspark_round_draft_budget_count"][""] == session.stats.draft_passes
    assert found["dspark_trim_ratio"][""] == pytest.approx(1 - counts.verified / counts.drafted)


def test_counters_grow_by_what_is_new_and_survive_a_session_that_ends() -> None:
    metrics = EngineMetrics()
    publisher = SpeculationMetrics(metrics)
    first = served(Session(FakeEngine(max_num_tokens=64), None, speculation="fixed"))
    drafted = first.stats.acceptance.drafted

    def total() -> float:
        publisher._next = 0.0
        publisher.update(sessions)
        found = by_labels(metrics.snapshot()["dspark_drafts_at_position"], "stage", "position")
        return sum(value for (stage, _), value in found.items() if stage == "drafted")

    sessions = [first]
    assert (total(), total()) == (drafted, drafted)
    served(first, 3)
    second = served(Session(FakeEngine(max_num_tokens=64), None, speculation="fixed"), 2)
    sessions = [second, first]
    both = first.stats.acceptance.drafted + second.stats.acceptance.drafted
    assert total() == both
    sessions = [second]
    assert total() == both


def test_reasons_times_and_states_of_adaptive_rounds() -> None:
    session = served(Session(FakeEngine(max_num_tokens=64), None, speculation="adaptive", cost_table=table()))
    found = snapshot(session)
    reasons = by_labels(found["dspark_speculation_rounds"], "reason")
    assert sum(reasons.values()) == sum(session.stats.plans.values()) > 0
    assert {reason for (reason,), count in reasons.items() if count} == set(session.stats.plans)
    assert found["dspark_planned_seconds"][""] > 0
    assert found["dspark_measured_seconds"][""] == pytest.approx(session.controller.counters.measured_us * 1e-6)
    assert found["dspark_speculation_bypassed"][""] in (0.0, 1.0)
    assert set(by_labels(found["dspark_cost_correction"], "part")) == {("base",), ("marginal",), ("draft",)}


def test_calibration_error_alarm_and_parameters() -> None:
    online = OnlineCalibration(Calibration.identity(GAMMA), OnlineConfig(every=8))
    session = Session(FakeEngine(max_num_tokens=64), None, speculation="threshold:0.01", calibration=online)
    served(session, 40, stop_token_ids=[])
    found = snapshot(session)
    # This drafter is right where its head says 0.95 and never where it says 0.27: the stored calibration errs.
    errors = by_labels(found["dspark_calibration_error"], "calibration")
    assert errors[("stored",)] > 0.05
    assert errors[("in_force",)] <= errors[("stored",)]
    assert found["dspark_calibration_drift"][""] == float(online.status.drift)
    assert found["dspark_calibration_updates"][""] == online.status.updates > 0
    bias = by_labels(found["dspark_calibration_bias"], "position")
    assert [bias[(str(k),)] for k in range(1, GAMMA + 1)] == pytest.approx(list(online.calibration.bias))
    temperature = by_labels(found["dspark_calibration_temperature"], "position")
    assert temperature[("1",)] == pytest.approx(online.calibration.temperature[0])


def test_every_input_and_decision_of_the_load_is_there() -> None:
    class Told:
        """A reader whose device tells everything."""

        def read(self) -> Sample:
            return Sample(
                0.0, sm_utilization=0.9, memory_utilization=0.6, memory_total_bytes=80, memory_free_bytes=40,
                others_memory_bytes=0, others_sm_utilization=0.0, num_others=0, sm_clock_mhz=990, sm_clock_max_mhz=1980,
                power_watts=500.0, power_limit_watts=700.0, temperature_celsius=60, temperature_slowdown_celsius=90,
                throttle_reasons=0, ecc_corrected=0, ecc_uncorrected=0, xids=(13,),
            )  # fmt: skip

        def close(self) -> None:
            pass

    monitor = LoadMonitor(Told(), clock=lambda: 0.0)
    monitor._step()
    control = LoadControl(monitor, max_requests=4, max_drafts=16)
    session = served(Session(FakeEngine(max_num_tokens=64), None, speculation="fixed", load=control))
    found = snapshot(session, load=control)
    for name in (*metric_names(), *LOAD_COUNTERS):
        assert "" in found[name], name
    assert found["dspark_load_sm_clock_mhz"][""] == 990
    assert found["dspark_load_reason_xid"][""] == 1
    assert found["dspark_load_samples"][""] == found["dspark_load_xids"][""] == 1
    assert found["dspark_limit_requests"][""] == 4
    assert found["dspark_limit_verify_budget"][""] == 16
    assert found["dspark_limit_cost_scale"][""] == 1


def test_declared_families_about_drafts_are_all_set_by_something() -> None:
    online = OnlineCalibration(Calibration.identity(GAMMA), OnlineConfig(every=8))
    learning = Session(FakeEngine(max_num_tokens=64), None, speculation="threshold:0.01", calibration=online)
    adaptive = Session(FakeEngine(max_num_tokens=64), None, speculation="adaptive", cost_table=table())
    first, second = (snapshot(served(session, 40)) for session in (learning, adaptive))
    found = {name: {**first[name], **second[name]} for name in first}
    prefixes = (
        "dspark_speculation",
        "dspark_calibration",
        "dspark_cost",
        "dspark_trim",
        "dspark_drafts",
        "dspark_round_",
    )
    names = [family.name for family in FAMILIES if family.kind is not Kind.HISTOGRAM]
    for name in names:
        if name.startswith(prefixes):
            assert found[name], name


def test_sessions_of_another_kind_show_nothing() -> None:
    metrics = EngineMetrics()
    SpeculationMetrics(metrics).update([object()])
    assert not metrics.snapshot()["dspark_drafts_at_position"]
