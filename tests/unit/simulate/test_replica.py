"""A simulated server does by hand-made numbers what the real one does: times, slots, refusals, ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.simulate.acceptance import AcceptanceProfile
from trtllm_dspark.simulate.scenario import Run, Scenario, Simulator
from trtllm_dspark.simulate.server import Policy, Server, parse_policies
from trtllm_dspark.simulate.traffic import Arrival, Lengths, Process, Traffic, make_traffic

EVERY_POLICY = "off,fixed:3,fixed,threshold:0.3,early_stop,stale_topk,adaptive"


def trace(*arrivals: tuple[float, int, int], domain: str = "math") -> Traffic:
    return Traffic("trace", Process("trace"), tuple(Arrival(t, p, o, domain) for t, p, o in arrivals))


def closed(users: int, count: int, *, seed: int = 0, output: str = "64") -> Traffic:
    return make_traffic(
        Process.parse(f"closed:{users}"),
        count=count,
        prompt=Lengths.parse("64"),
        output=Lengths.parse(output),
        domains={"math": 1, "chat": 1},
        seed=seed,
    )


def run(server: Server, profile: AcceptanceProfile, policy: str, traffic: Traffic, **scenario: object) -> Run:
    simulator = Simulator(Scenario(server, profile, **scenario))  # type: ignore[arg-type]
    return simulator.run(Policy.parse(policy), traffic)


def test_plain_decoding_takes_the_sum_of_its_passes(server: Server, profile: AcceptanceProfile) -> None:
    result = run(server, profile, "off", trace((2.0, 128, 11)))
    (record,) = result.result.records
    table = server.table
    # 128 prompt tokens in one pass, then ten rounds of one token.
    prefill = float(table.step_time_us(64, 200, depth=0)[128])
    decode = sum(float(table.step_time_us(1, 8, depth=128 + step)[1]) for step in range(10))
    assert record.first_token_s == pytest.approx(2.0 + prefill * 1e-6, rel=1e-4)
    assert record.last_token_s == pytest.approx(2.0 + (prefill + decode) * 1e-6, rel=1e-4)
    assert (record.output_tokens, record.rounds, record.verified) == (11, 10, 0)


@pytest.mark.parametrize("policy", EVERY_POLICY.split(","))
def test_every_request_gets_exactly_its_tokens(server: Server, profile: AcceptanceProfile, policy: str) -> None:
    traffic = closed(8, 60, output="uniform:1:90")
    result = run(server, profile, policy, traffic)
    for record, arrival in zip(result.result.records, traffic.arrivals, strict=True):
        assert record.output_tokens == arrival.output_tokens
        assert record.output_tokens == 1 + record.rounds + record.accepted
        assert record.accepted <= record.verified <= 5 * record.rounds


def test_accepted_length_of_whole_blocks_is_the_profiles(server: Server, profile: AcceptanceProfile) -> None:
    traffic = make_traffic(
        Process.parse("closed:16"),
        count=64,
        prompt=Lengths.parse("32"),
        output=Lengths.parse("800"),
        domains={"math": 1},
        seed=1,
    )
    summary = run(server, profile, "fixed:5", traffic).summary
    assert summary.accepted_len == pytest.approx(profile.accepted_len("math"), rel=0.03)
    assert summary.verify_budget == pytest.approx(5, rel=0.02)
    assert summary.wasted == pytest.approx(1 - (profile.accepted_len("math") - 1) / 5, abs=0.03)


def test_same_seed_same_result_and_another_seed_another(server: Server, profile: AcceptanceProfile) -> None:
    first, again = (run(server, profile, "adaptive", closed(8, 40), seed=3) for _ in range(2))
    other = run(server, profile, "adaptive", closed(8, 40), seed=4)
    assert first.summary == again.summary
    assert first.result.logs == again.result.logs
    assert first.summary != other.summary


def test_no_more_requests_run_than_there_are_slots_and_none_is_preempted(
    server: Server, profile: AcceptanceProfile
) -> None:
    small = replace(server, max_batch_size=4, max_num_tokens=128)
    result = run(small, profile, "fixed:3", closed(32, 64))
    log = result.result.logs[0]
    assert max(log.num_requests) == 4
    assert max(log.waiting) >= 27
    starts = [record.scheduled_s for record in result.result.records]
    assert starts == sorted(starts)  # type: ignore[type-var]


def test_a_full_slot_ends_a_request_and_a_prompt_that_fills_it_is_refused(
    server: Server, profile: AcceptanceProfile
) -> None:
    small = replace(server, max_seq_len=100)
    result = run(small, profile, "fixed:3", trace((0, 60, 500), (0, 99, 5), (0, 100, 5)))
    assert [record.output_tokens for record in result.result.records] == [40, 1, 0]
    assert [record.error for record in result.result.records] == ["", "", "prompt_too_long"]
    assert (result.summary.requests, result.summary.failed) == (2, 1)


def test_a_full_queue_refuses(server: Server, profile: AcceptanceProfile) -> None:
    small = replace(server, max_batch_size=2, max_num_tokens=64, max_queue_size=3)
    result = run(small, profile, "off", trace(*[(0.0, 32, 20)] * 10))
    refused = [record.error for record in result.result.records]
    assert refused.count("queue_full") == 5


def test_prompts_slow_down_decoding(server: Server, profile: AcceptanceProfile) -> None:
    """Prefill shares the round: who decodes meanwhile waits, for a pass of its own longer than for a shared one."""
    alone = trace((0, 32, 400))
    disturbed = trace((0, 32, 400), *[(0.1 * step, 900, 1) for step in range(1, 12)])

    def speed(traffic: Traffic, *, shared: bool) -> float:
        result = run(replace(server, shared_prefill=shared), profile, "off", traffic)
        return result.result.records[0].user_speed or 0.0

    assert speed(disturbed, shared=False) < speed(disturbed, shared=True) < 0.99 * speed(alone, shared=True)


def test_a_policy_without_times_or_acceptance_is_refused(server: Server, profile: AcceptanceProfile) -> None:
    with pytest.raises(ConfigError, match="needs the acceptance of its drafter; give --mtp_acceptance"):
        run(server, profile, "mtp1", closed(1, 2))
    with pytest.raises(ConfigError, match="test has none; use an estimated cost table"):
        run(server, profile, "mtp1", closed(1, 2), others=profile)
    with pytest.raises(ConfigError, match="mtp takes the number of drafts"):
        parse_policies("off,mtp")
    with pytest.raises(ConfigError, match="knows 5 drafts and test makes 7"):
        Simulator(Scenario(replace(server, max_draft_len=7), profile))
