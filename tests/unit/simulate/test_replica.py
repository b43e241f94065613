"""A simulated server does by hand-made numbers what the real one does: times, slots, refusals, ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.simulate.acceptance import AcceptanceProfile, from_recorded
from trtllm_dspark.simulate.blocks import Blocks
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


@pytest.mark.parametrize(("policy", "tokens"), [("off", 0), ("fixed:3", 100 + 6), ("fixed:1", 100 + 6)])
def test_tokens_that_a_context_absorbs_take_their_time(server: Server, policy: str, tokens: int) -> None:
    """A prompt of 100, then rounds of 4, 4 and 3 tokens, or of 2 five times and a plain one."""
    sure = from_recorded("sure", "by hand", {"math": Blocks(np.full((8, 5), 0.99, np.float32), np.full(8, 5))})
    traffic = trace((0.0, 100, 12), domain="math")
    before = run(server, sure, policy, traffic)
    after = run(replace(server, absorb_us=40.0), sure, policy, traffic)
    (first,), (then,) = before.result.records, after.result.records
    assert first.last_token_s is not None
    assert then.last_token_s == pytest.approx(first.last_token_s + 40e-6 * tokens, abs=1e-12)
    assert then.rounds == first.rounds
    # What never adapts absorbs a prompt at once.
    assert then.first_token_s == pytest.approx((first.first_token_s or 0.0) + 40e-6 * min(tokens, 100), abs=1e-12)


def test_what_adapts_absorbs_a_prompt_with_its_first_draft(server: Server, profile: AcceptanceProfile) -> None:
    traffic = trace((0.0, 100, 60), (0.0, 5, 1))
    before = run(server, profile, "adaptive", traffic)
    after = run(replace(server, absorb_us=40.0), profile, "adaptive", traffic)
    first, then = before.result.records[0], after.result.records[0]
    log, plain = after.result.logs[0], before.result.logs[0]
    assert then.first_token_s == first.first_token_s
    drafted = next(index for index, count in enumerate(log.drafted) if count)
    waited = 100 + sum(log.num_requests[:drafted])
    assert log.duration_us[drafted] == pytest.approx(plain.duration_us[drafted] + 40 * (waited - 1), abs=1e-6)
    # The same decisions: nobody is told what absorbing took.
    assert log.drafts == plain.drafts
    gathered = [i for i, more in enumerate(np.subtract(log.duration_us, plain.duration_us)) if more > 1e-6]
    assert all(log.drafted[index] for index in gathered)
