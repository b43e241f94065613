"""The load of a GPU as limits of a session: through the real nvidia-ml-py over the stub, and on readers of our own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.fake_engine import FakeEngine, collect_outputs, greedy, token_ids
from helpers.nvml_stub import NvmlStub, build_stub

from trtllm_dspark.load import LoadMonitor, LoadPolicy, LoadState, Sample
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.load_control import LoadControl
from trtllm_dspark.speculation import SpeculationConfig
from trtllm_dspark.speculation.controller import LoadLimits

Line = dict[str, Any]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    found = build_stub(tmp_path_factory.mktemp("nvml"))
    if found is None:
        pytest.skip("the NVML stub needs a C compiler")
    return found


def serve(stub: NvmlStub, trace: str, speculation: str = "fixed") -> list[Line]:
    """Return what a session did, sample by sample."""
    done = stub.run(trace, "-m", "helpers.nvml_stub.replay_session", speculation)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def verified(lines: list[Line]) -> list[int]:
    return [count for line in lines for count in line["verified"]]


def test_throttled_clocks_scale_costs_and_fewer_drafts_are_verified(stub: NvmlStub) -> None:
    lines = serve(stub, "thermal_throttle", "early_stop")
    throttled = [line for line in lines if line["cost_scale"] == pytest.approx(1.5, abs=1e-3)]
    free = [line for line in lines if line["cost_scale"] == 1.0]
    assert len(throttled) > 20
    assert {line["reason"] for line in throttled} == {"thermal_throttle"}
    mean = [sum(verified(part)) / len(verified(part)) for part in (throttled, free)]
    assert 0 < mean[0] < mean[1]


def test_co_tenant_shrinks_the_budget_that_a_round_verifies(stub: NvmlStub) -> None:
    lines = serve(stub, "co_tenant")
    shared = [line for line in lines if line["verify_budget"] == 9]
    assert len(shared) > 20
    assert max(verified(shared)) == 9
    free = [line for line in lines if line["verify_budget"] is None]
    assert max(verified(free)) > 12
    assert all(line["admit"] for line in lines)


def test_falling_memory_closes_admission_and_running_requests_go_on(stub: NvmlStub) -> None:
    lines = serve(stub, "memory_pressure")
    half = [line for line in lines if line["max_requests"] == 2 and line["admit"]]
    closed = [line for line in lines if not line["admit"]]
    assert half
    assert len(closed) > 20
    assert {line["joined"] for line in closed} == {0}
    # Whoever had a slot went on to its end.
    assert closed[0]["running"] > 0
    assert any(sum(line["verified"]) for line in closed)
    assert closed[-1]["running"] == 0
    # Half open again, then open: nobody beyond the limit was let in, and all slots fill.
    last = [line for line in half if lines.index(line) > lines.index(closed[-1])]
    assert max(line["running"] for line in last) == 2
    assert max(line["running"] for line in lines[-5:]) == 4


def test_lost_gpu_stops_drafts_and_admission_until_it_is_back(stub: NvmlStub) -> None:
    lines = serve(stub, "gpu_lost")
    lost = [line for line in lines if "gpu_lost" in line["reason"]]
    assert lost
    assert {(line["admit"], line["verify_budget"], line["joined"]) for line in lost} == {(False, 0, 0)}
    assert set(verified(lost)) <= {0}
    assert lines[-1]["admit"]
    assert lines[-1]["verify_budget"] is None


@pytest.mark.parametrize("trace", ["driver_gone", "no_driver", "no_gpu", "hiccup", "healthy"])
def test_library_that_fails_never_reaches_the_step_loop(stub: NvmlStub, trace: str) -> None:
    lines = serve(stub, trace)
    # The helper's own assertions hold: every request got its greedy tokens.
    assert all(line["admit"] for line in lines)
    assert max(verified(lines[-5:])) > 12


class Ready:
    """A monitor that has decided."""

    def __init__(self, state: LoadState) -> None:
        self.decided = state

    def state(self) -> LoadState:
        return self.decided


@pytest.mark.parametrize(
    ("state", "limits"),
    [
        (LoadState(), LoadLimits()),
        (LoadState(True, compute_scale=1.5, reasons=("power_cap",)), LoadLimits(cost_scale=1.5, reason="power_cap")),
        (LoadState(True, budget_scale=0.6, reasons=("co_tenant",)), LoadLimits(verify_budget=12, reason="co_tenant")),
        (LoadState(True, admission_scale=0.5), LoadLimits(max_requests=2)),
        (LoadState(True, admission_scale=0.01), LoadLimits(max_requests=1)),
        (
            LoadState(budget_scale=0, admission_scale=0, reasons=("gpu_lost", "gpu_fault")),
            LoadLimits(verify_budget=0, max_requests=0, admit=False, reason="gpu_lost, gpu_fault"),
        ),
    ],
)
def test_decisions_become_limits(state: LoadState, limits: LoadLimits) -> None:
    control = LoadControl(Ready(state), max_requests=4, max_drafts=20)  # type: ignore[arg-type]
    assert control.limits() == limits
    assert control.limits() is control.limits()
    assert control.request_limit() == (limits.max_requests if limits.admit else 0)


def test_limits_of_an_engine_count_its_slots_and_drafts() -> None:
    engine = FakeEngine(max_batch_size=4, gamma=4, max_num_tokens=14)
    control = LoadControl.for_engine(engine.limits)
    control.monitor = Ready(LoadState(True, budget_scale=0.5, admission_scale=0.5))  # type: ignore[assignment]
    assert control.limits() == LoadLimits(verify_budget=5, max_requests=2)


def test_reader_that_raises_costs_a_session_nothing() -> None:
    class Broken:
        def read(self) -> Sample:
            raise OSError("segment")

        def close(self) -> None:
            pass

    monitor = LoadMonitor(Broken(), LoadPolicy(), interval_s=0.001)
    with LoadControl(monitor, max_requests=4, max_drafts=16) as control:
        session = Session(FakeEngine(), None, speculation=SpeculationConfig("fixed"), load=control)
        session.add(Request("a", [3, 1, 4], SamplingParams(max_tokens=20)))
        assert token_ids(collect_outputs(session)["a"]) == greedy([3, 1, 4], 20)
        assert control.metrics()["dspark_load_failures"] >= 1
