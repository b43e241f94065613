"""Sessions with two rounds in flight emit what the CPU engine's sessions emit, on a late and on an early device."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_engine import token_ids
from helpers.tiny_tensorrt import Written
from helpers.trt_fixtures import AnyOpened, Opened
from helpers.trt_sessions import make, requests, run, table, take

from trtllm_dspark.errors import DeviceError, RequestError
from trtllm_dspark.runtime import Request, SamplingParams, Session


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_session_random_pair_equals_cpu(random_weights: Written, opened: Opened, late: bool) -> None:
    todo = requests(random_weights, 12)
    expected = run(make(random_weights.cpu, random_weights, "off"), todo)
    engine, device = opened(random_weights, late=late)
    session = make(engine, random_weights, "fixed")
    assert run(session, todo) == expected
    assert session.stats.slot_copies > 0
    assert session.stats.acceptance.verified > 0


def test_session_with_kernel_sources_equals_cpu(random_weights: Written, opened: Opened) -> None:
    """The launch parameters fit the kernels: the CUDA sources, compiled for the host, run whole rounds."""
    todo = requests(random_weights, 3, longest=12)
    expected = run(make(random_weights.cpu, random_weights, "off"), todo)
    engine, _ = opened(random_weights, kernels="sources")
    assert run(make(engine, random_weights, "threshold:0.2"), todo) == expected


@pytest.mark.parametrize("speculation", ["off", "fixed:3", "threshold:0.4", "stale_topk:6"])
def test_session_toy_pair_equals_cpu(toy_weights: Written, opened: Opened, speculation: str) -> None:
    todo = requests(toy_weights, 5, longest=12)
    expected = run(make(toy_weights.cpu, toy_weights, "off"), todo)
    engine, _ = opened(toy_weights)
    session = make(engine, toy_weights, speculation)
    assert run(session, todo) == expected
    if speculation != "off":
        # Drafts are right most of the time: rounds emit more than one token.
        assert session.stats.acceptance.accepted > session.stats.acceptance.verified / 3
        assert engine.graph_stats is not None
        assert engine.graph_stats.replays > engine.graph_stats.misses


def test_session_request_that_ends_leaves_its_round_unread(toy_weights: Written, opened_toy: AnyOpened) -> None:
    """A stop token in round n is seen after round n + 1 was submitted: nothing of that round is emitted."""
    prompt = Request("a", [40], SamplingParams(max_tokens=30, temperature=0))
    (tokens,) = run(make(toy_weights.cpu, toy_weights, "off"), [prompt]).values()
    stop = tokens[9]
    stopped = Request("a", [40], SamplingParams(max_tokens=30, temperature=0, stop_token_ids=(stop,)))
    engine, _ = opened_toy()
    session = make(engine, toy_weights, "fixed")
    assert run(session, [stopped])["a"] == tokens[: tokens.index(stop) + 1]
    # The slot is taken over at once by a request that must not see what the other left.
    assert run(session, [prompt])["a"] == tokens


def test_session_cancelled_in_flight_emits_nothing_more(toy_weights: Written, opened_toy: AnyOpened) -> None:
    engine, _ = opened_toy()
    session = make(engine, toy_weights, "fixed")
    todo = [Request(name, [40 + n], SamplingParams(max_tokens=24, temperature=0)) for n, name in enumerate("abc")]
    expected = run(make(toy_weights.cpu, toy_weights, "off"), todo)
    seen: dict[str, list[Any]] = {}
    for request in todo:
        session.add(request)
    for number in range(40):
        if not session.has_unfinished():
            break
        if number == 3:
            assert session.cancel("b")
        for output in session.step():
            seen.setdefault(output.request_id, []).append(output)
    assert [entry.finish_reason for entry in seen["b"]][-1] == "cancelled"
    assert token_ids(seen["b"]) == expected["b"][: len(token_ids(seen["b"]))]
    for name in "ac":
        assert token_ids(seen[name]) == expected[name]


def test_session_same_id_again_gets_its_own_tokens(toy_weights: Written, opened_toy: AnyOpened) -> None:
    """A new request of an old name is not mistaken for the one whose round is still in flight."""
    engine, _ = opened_toy()
    session = make(engine, toy_weights, "fixed")
    first = Request("a", [40], SamplingParams(max_tokens=4, temperature=0))
    second = Request("a", [60], SamplingParams(max_tokens=9, temperature=0))
    other = Request("b", [50], SamplingParams(max_tokens=40, temperature=0))
    expected = run(make(toy_weights.cpu, toy_weights, "off"), [second])["a"]
    session.add(first)
    session.add(other)
    tokens: list[int] = []
    added = False
    while session.has_unfinished():
        for output in session.step():
            if output.request_id == "a" and added:
                tokens += output.new_token_ids
            elif output.request_id == "a" and output.finished:
                session.add(second)
                added = True
    assert tokens == expected


def test_session_one_round_at_a_time_decides_on_the_host(toy_weights: Written, opened: Opened) -> None:
    engine, device = opened(toy_weights, kernels=None)
    assert engine.rounds_in_flight == 0
    request = Request("a", [40], SamplingParams(max_tokens=12, temperature=0, logprobs=True))
    expected = run(make(toy_weights.cpu, toy_weights, "fixed"), [request])
    assert run(make(engine, toy_weights, "fixed"), [request]) == expected
    assert not [op for op in device.ops if op.kind == "launch"]


def test_session_refuses_what_needs_logits_on_the_host(toy_weights: Written, opened: Opened) -> None:
    engine, _ = opened(toy_weights)
    session = make(engine, toy_weights, "fixed")
    with pytest.raises(RequestError, match="log-probabilities need rounds one at a time"):
        session.add(Request("a", [4], SamplingParams(max_tokens=4, logprobs=True)))
    stops = tuple(range(20))
    with pytest.raises(RequestError, match="min_tokens with 20 end tokens, this engine takes 16"):
        session.add(Request("a", [4], SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=stops)))
    assert not session.has_unfinished()
    single = make(engine, toy_weights, "fixed", rounds_in_flight=1)
    assert len(run(single, [Request("a", [40], SamplingParams(max_tokens=4, logprobs=True))])["a"]) == 4


@pytest.mark.parametrize("plan", ["target", "drafter_block", "drafter_context"])
def test_session_failed_pass_ends_every_request(toy_weights: Written, opened: Opened, plan: str) -> None:
    engine, device = opened(toy_weights, cuda_graphs=False)
    session = make(engine, toy_weights, "fixed")
    for name in "ab":
        session.add(Request(name, [40], SamplingParams(max_tokens=30, temperature=0)))
    outputs = [output for _ in range(3) for output in session.step()]
    device.fail_pass = plan
    while session.has_unfinished():
        outputs += session.step()
    last = {output.request_id: output for output in outputs}
    assert {output.finish_reason for output in last.values()} == {"error"}
    assert all("planted failure" in str(output.error) for output in last.values())
    assert session.failure is not None
    device.finish()


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_session_rejection_draws_as_the_cpu_does(toy_weights: Written, opened: Opened, late: bool) -> None:
    """Equal seeds, equal verify lengths: acceptance, residual and bonus tokens are the same draws, in any batch."""
    todo = requests(toy_weights, 6, longest=12)
    options = {"speculation": "fixed", "acceptance": "rejection", "eos_token_ids": (5,)}
    expected = run(Session(toy_weights.cpu, None, **options), todo)
    engine, _ = opened(toy_weights, late=late)
    session = Session(engine, None, **options)
    assert run(session, todo) == expected
    assert 0 < session.stats.acceptance.accepted < session.stats.acceptance.verified


def test_session_adaptive_drafts_bypasses_and_probes(toy_weights: Written, opened: Opened) -> None:
    """The controller's plans run on the device: where drafts cost too much it stops drafting and looks again."""
    todo = requests(toy_weights, 8, longest=12)
    expected = run(make(toy_weights.cpu, toy_weights, "off"), todo)
    gamma = toy_weights.limits.max_draft_len
    for draft_us, wanted in ((10.0, {"speculate"}), (900.0, {"bypass"})):
        engine, _ = opened(toy_weights)
        costs = table(gamma, draft_us)
        take(engine, draft_us)
        session = make(engine, toy_weights, "adaptive", cost_table=costs)
        assert run(session, todo) == expected
        plans = {reason for reason, count in session.stats.plans.items() if count}
        assert wanted <= plans, session.stats.plans
        assert session.stats.acceptance.verified > 0


def test_session_stale_budget_follows_collected_confidences(toy_weights: Written, opened: Opened) -> None:
    """The budget of a round comes from confidences at least two rounds old, never from its own."""
    engine, device = opened(toy_weights)
    session = make(engine, toy_weights, "stale_topk", cost_table=table(toy_weights.limits.max_draft_len, 10.0))
    submitted: list[Any] = []
    original = engine.submit_round

    def submit(batch: Any) -> int:
        submitted.append((batch.decode, engine._rounds.num_in_flight))  # type: ignore[union-attr]
        return original(batch)

    engine.submit_round = submit  # type: ignore[method-assign]
    todo = requests(toy_weights, 3, longest=12)
    assert run(session, todo) == run(make(toy_weights.cpu, toy_weights, "off"), todo)
    budgets = [decode.schedule.budget for decode, _ in submitted if decode is not None and decode.schedule is not None]
    gamma = toy_weights.limits.max_draft_len
    assert budgets[0] >= gamma - 1, "nothing is known of a request at first: it is verified in full"
    assert len(set(budgets)) > 2, "budgets follow the confidences"
    assert max(flying for _, flying in submitted) == 1


def test_session_device_that_fails_in_flight_ends_every_request(
    toy_weights: Written, opened_toy: AnyOpened, caplog: pytest.LogCaptureFixture
) -> None:
    """Work fails on the device itself: the host learns of it when it waits, and closing still returns."""
    engine, device = opened_toy()
    session = make(engine, toy_weights, "fixed")
    session.add(Request("a", [40], SamplingParams(max_tokens=30, temperature=0)))
    outputs = session.step() + session.step()
    device.fail_wait = True
    while session.has_unfinished():
        outputs += session.step()
    assert outputs[-1].finish_reason == "error"
    assert outputs[-1].error_code == "engine_failed"
    with pytest.raises(DeviceError, match="the engine has failed .planted failure of a wait."):
        session.add(Request("b", [40], SamplingParams(max_tokens=3)))
    session.close()
    session.close()
    assert "the device failed before it was closed" in caplog.text
    device.fail_wait = False
    device.finish()
