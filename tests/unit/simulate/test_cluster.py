"""Routers, faults, NVML and scaling do what they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.simulate.acceptance import AcceptanceProfile
from trtllm_dspark.simulate.cluster_view import timelines
from trtllm_dspark.simulate.faults import Fault
from trtllm_dspark.simulate.router import make_router
from trtllm_dspark.simulate.scaling import Autoscaler
from trtllm_dspark.simulate.scenario import Run, Scenario, Simulator
from trtllm_dspark.simulate.server import Policy, Server
from trtllm_dspark.simulate.traffic import Lengths, Process, Traffic, make_traffic


def traffic(rate: float, count: int, *, kind: str = "poisson", output: str = "uniform:20:120") -> Traffic:
    return make_traffic(
        Process.parse(f"{kind}:{rate}"),
        count=count,
        prompt=Lengths.parse("64"),
        output=Lengths.parse(output),
        domains={"chat": 1},
        seed=2,
    )


def run(server: Server, profile: AcceptanceProfile, load: Traffic, policy: str = "fixed:3", **scenario: object) -> Run:
    return Simulator(Scenario(server, profile, **scenario)).run(Policy.parse(policy), load)  # type: ignore[arg-type]


def served_by(result: Run) -> list[int]:
    counts = [0] * len(result.result.logs)
    for record in result.result.records:
        counts[record.replica] += 1
    return counts


def test_round_robin_shares_evenly_and_more_replicas_shorten_the_wait(
    small: Server, profile: AcceptanceProfile
) -> None:
    load = traffic(40, 200)
    one, three = (run(small, profile, load, replicas=count) for count in (1, 3))
    assert max(served_by(three)) - min(served_by(three)) <= 1
    assert three.summary.ttft_ms[1] < 0.5 * one.summary.ttft_ms[1]


def test_least_loaded_waits_less_than_round_robin_when_outputs_differ(
    small: Server, profile: AcceptanceProfile
) -> None:
    load = traffic(80, 400, output="lognormal:40:1.2")
    blind, seeing = (run(small, profile, load, replicas=3, router=router) for router in ("round_robin", "least_loaded"))
    assert seeing.summary.ttft_ms[1] < blind.summary.ttft_ms[1]


def test_a_throttled_node_gets_less_when_load_is_read(small: Server, profile: AcceptanceProfile) -> None:
    faults = (Fault.parse("throttle:0:1:1000:0.25"),)
    load = traffic(50, 300)
    blind = run(small, profile, load, replicas=3, faults=faults, router="round_robin")
    seeing = run(small, profile, load, replicas=3, faults=faults, router="load_aware", nvml=True)
    assert served_by(blind)[0] == pytest.approx(100, abs=1)
    assert served_by(seeing)[0] < 70
    assert seeing.summary.ttft_ms[1] < blind.summary.ttft_ms[1]


def test_a_lost_node_loses_no_request_and_is_avoided_sooner_when_load_is_read(
    small: Server, profile: AcceptanceProfile
) -> None:
    faults = (Fault.parse("lost:1:2:20"),)
    load = traffic(40, 400)
    blind = run(small, profile, load, replicas=3, faults=faults)
    seeing = run(small, profile, load, replicas=3, faults=faults, router="load_aware", nvml=True)
    for result in (blind, seeing):
        assert result.summary.failed == 0
        expected = [arrival.output_tokens for arrival in load.arrivals]
        assert [record.output_tokens for record in result.result.records] == expected
    assert 0 < seeing.result.retries < 0.5 * blind.result.retries


def test_scaling_follows_the_load_up_and_down(small: Server, profile: AcceptanceProfile) -> None:
    calm, rush = traffic(2, 20), traffic(70, 700)
    start = calm.arrivals[-1].time_s
    later = [replace(arrival, time_s=arrival.time_s + start) for arrival in rush.arrivals]
    end = later[-1].time_s
    again = [replace(arrival, time_s=arrival.time_s + end) for arrival in traffic(2, 100).arrivals]
    load = Traffic("rush", Process("trace"), (*calm.arrivals, *later, *again))
    result = run(small, profile, load, autoscaling="1:4:2:20").result
    counts = [count for _, count in result.replicas]
    assert counts[0] == 1
    assert max(counts) >= 3
    assert counts[-1] < max(counts)
    assert all(record.output_tokens for record in result.records)


def test_scaler_answers_as_the_kubernetes_formula_does() -> None:
    scaler = Autoscaler.parse("2:6")
    assert scaler.wanted(0.0, []) == 2
    with pytest.raises(ConfigError, match="use LEAST:MOST"):
        Autoscaler.parse("3:2")


def test_timelines_tell_replicas_and_tokens(small: Server, profile: AcceptanceProfile) -> None:
    result = run(small, profile, traffic(20, 100), replicas=2)
    names = [name.split(":")[0] for name, _, _ in timelines([result])]
    assert names == ["replicas", "requests waiting", "tokens/s"]
    _, seconds, tokens = timelines([result])[2]
    step = seconds[1] - seconds[0]
    assert sum(tokens) * step == pytest.approx(sum(r.output_tokens for r in result.result.records), rel=0.02)


@pytest.mark.parametrize("text", ["lost:0:1", "throttle:0:1:2:0", "throttle:0:1:2:1.5", "melt:0:1:2", "lost:a:1:2"])
def test_bad_fault_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="is not known; use throttle:REPLICA"):
        Fault.parse(text)


def test_unknown_router_and_replica_are_refused(small: Server, profile: AcceptanceProfile) -> None:
    with pytest.raises(ConfigError, match="use round_robin, least_loaded, load_aware"):
        make_router("random")
    with pytest.raises(ConfigError, match="names replica 2; there are 2, from 0"):
        run(small, profile, traffic(1, 1), replicas=2, faults=(Fault.parse("lost:2:0:1"),))
