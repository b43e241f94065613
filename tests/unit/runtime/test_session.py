"""The session over the fake engine: its target hashes the whole prefix, so any slip in slots or positions shows."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from helpers.fake_engine import FakeEngine, collect_outputs, greedy, token_ids

from trtllm_dspark.errors import ConfigError, DeviceError, RequestError
from trtllm_dspark.runtime import Request, SamplingParams, Session

MODES = ["off", "fixed", "fixed:1", "fixed:2", "threshold:0.3", "early_stop", "stale_topk", "stale_topk:3", "adaptive"]


def make(mode: str = "fixed", *, engine: FakeEngine | None = None, **options: Any) -> Session:
    return Session(engine or FakeEngine(), None, speculation=mode, **options)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 17 + index * 5) % 64 for index in range(length)]


@pytest.mark.parametrize("mode", MODES)
def test_step_one_request_emits_the_target_greedy_tokens(mode: str) -> None:
    session = make(mode)
    session.add(Request("a", prompt(1, 9), SamplingParams(max_tokens=40)))
    outputs = collect_outputs(session)["a"]
    assert token_ids(outputs) == greedy(prompt(1, 9), 40)
    assert outputs[-1].finish_reason == "length"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_num_tokens", [6, 11, 32])
def test_step_mixed_traffic_every_request_equals_itself_alone(mode: str, max_num_tokens: int) -> None:
    session = make(mode, engine=FakeEngine(max_num_tokens=max_num_tokens))
    wanted = {}
    for index in range(14):
        length, count = 1 + index * 7 % 40, 1 + index * 5 % 33
        params = SamplingParams(
            max_tokens=count, speculation=index % 3 != 0, max_draft_len=None if index % 2 else index % 5
        )
        wanted[str(index)] = greedy(prompt(index, length), count)
        session.add(Request(str(index), prompt(index, length), params))
    outputs = collect_outputs(session)
    assert {name: token_ids(rows) for name, rows in outputs.items()} == wanted


def test_step_late_requests_join_between_rounds() -> None:
    session = make("fixed")
    session.add(Request("a", prompt(1, 5), SamplingParams(max_tokens=30)))
    seen: dict[str, list[int]] = {}
    for turn in range(200):
        if turn in (2, 3, 7, 8, 12):
            session.add(Request(f"late{turn}", prompt(turn, 3 + turn), SamplingParams(max_tokens=9)))
        for output in session.step():
            seen.setdefault(output.request_id, []).extend(output.new_token_ids)
        if turn > 12 and not session.has_unfinished():
            break
    assert seen.pop("a") == greedy(prompt(1, 5), 30)
    for name, tokens in seen.items():
        turn = int(name.removeprefix("late"))
        assert tokens == greedy(prompt(turn, 3 + turn), 9)
    assert len(seen) == 5


def test_step_gives_one_output_a_request_a_round() -> None:
    session = make("fixed")
    for name in "abc":
        session.add(Request(name, prompt(3, 4), SamplingParams(max_tokens=20)))
    while session.has_unfinished():
        names = [output.request_id for output in session.step()]
        assert len(names) == len(set(names))


def test_step_long_prompt_shares_rounds_with_decoding() -> None:
    engine = FakeEngine(max_num_tokens=12)
    session = make("fixed", engine=engine)
    session.add(Request("a", prompt(1, 4), SamplingParams(max_tokens=60)))
    session.step()
    session.add(Request("long", prompt(2, 60), SamplingParams(max_tokens=5)))
    gained = 0
    while session.num_waiting or any(not row.decoding for row in session._slots):
        gained += sum(len(output.new_token_ids) for output in session.step() if output.request_id == "a")
    assert gained >= 60 // 12
    assert max(len(batch.token_ids) for batch in engine.verified) <= 12


def test_step_draft_cap_never_exceeds_what_is_left() -> None:
    engine = FakeEngine(mistake_every=0)
    session = make("fixed", engine=engine)
    session.add(Request("a", prompt(1, 3), SamplingParams(max_tokens=8)))
    collect_outputs(session)
    # 1 from the prompt, 5 from a whole block, then two are left: one draft and the bonus.
    assert [len(batch.token_ids) for batch in engine.verified] == [3, 5, 2]


@pytest.mark.parametrize("mode", ["off", "fixed", "fixed:2"])
@pytest.mark.parametrize("prompt_len", range(80, 96))
def test_step_output_reaches_the_end_of_the_sequence_limit(mode: str, prompt_len: int) -> None:
    session = make(mode, engine=FakeEngine(max_seq_len=96))
    session.add(Request("a", prompt(5, prompt_len), SamplingParams(max_tokens=500)))
    outputs = collect_outputs(session)["a"]
    assert token_ids(outputs) == greedy(prompt(5, prompt_len), 96 - prompt_len)
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("mode", ["off", "fixed", "threshold:0.3"])
def test_step_stop_token_inside_a_block_ends_there(mode: str) -> None:
    expected = greedy(prompt(1, 6), 30)
    stop = expected[12]
    session = make(mode, engine=FakeEngine(mistake_every=0))
    session.add(Request("a", prompt(1, 6), SamplingParams(max_tokens=30, stop_token_ids=[stop])))
    outputs = collect_outputs(session)["a"]
    assert token_ids(outputs) == expected[: expected.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)


def test_step_end_of_sequence_ends_unless_ignored() -> None:
    expected = greedy(prompt(1, 6), 20)
    engine = FakeEngine()
    session = make("fixed", engine=engine, eos_token_ids=[expected[4]])
    session.add(Request("a", prompt(1, 6), SamplingParams(max_tokens=20)))
    session.add(Request("b", prompt(1, 6), SamplingParams(max_tokens=20, ignore_eos=True)))
    outputs = collect_outputs(session)
    assert token_ids(outputs["a"]) == expected[: expected.index(expected[4]) + 1]
    assert token_ids(outputs["b"]) == expected


@pytest.mark.parametrize("mode", ["off", "fixed"])
def test_step_min_tokens_bans_end_tokens_at_every_position_of_a_block(mode: str) -> None:
    expected = greedy(prompt(1, 6), 20)
    session = make(mode)
    params = SamplingParams(max_tokens=20, min_tokens=10, stop_token_ids=list(set(expected)))
    session.add(Request("a", prompt(1, 6), params))
    session.add(Request("b", prompt(2, 6), SamplingParams(max_tokens=20)))
    outputs = collect_outputs(session)
    assert not set(token_ids(outputs["a"])[:10]) & set(expected)
    assert outputs["a"][-1].stats.num_output_tokens >= 10
    assert token_ids(outputs["b"]) == greedy(prompt(2, 6), 20)


def test_cancel_running_request_frees_its_slot_within_one_round() -> None:
    session = make("fixed", engine=FakeEngine(max_batch_size=1))
    session.add(Request("a", prompt(1, 4), SamplingParams(max_tokens=50)))
    session.add(Request("b", prompt(2, 4), SamplingParams(max_tokens=5)))
    session.step()
    assert session.cancel("a")
    outputs = session.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", "cancelled"), ("b", None)]
    assert token_ids(collect_outputs(session)["b"]) == greedy(prompt(2, 4), 5)[1:]


def test_cancel_between_submit_and_collect_ends_the_request_in_collect() -> None:
    session = make("fixed")
    session.add(Request("a", prompt(1, 4), SamplingParams(max_tokens=50)))
    session.step()
    session.submit()
    session.cancel("a")
    assert [output.finish_reason for output in session.collect()] == ["cancelled"]
    assert not session.has_unfinished()
    assert session.num_running == 0


@pytest.mark.parametrize("rounds_before", [0, 1, 2])
def test_cancel_waiting_or_prefilling_request_ends_it(rounds_before: int) -> None:
    session = make("fixed", engine=FakeEngine(max_num_tokens=8))
    session.add(Request("a", prompt(1, 40)))
    for _ in range(rounds_before):
        session.step()
    session.cancel("a")
    assert [output.finish_reason for output in session.step()] == ["cancelled"]
    assert (session.num_running, session.num_waiting) == (0, 0)


def test_cancel_unknown_request_is_false() -> None:
    assert not make().cancel("nobody")


def test_step_nan_logits_end_that_request_alone() -> None:
    session = make("fixed", engine=FakeEngine(nan_prefix=63))
    session.add(Request("bad", [63, 1, 2]))
    session.add(Request("good", prompt(2, 4), SamplingParams(max_tokens=15)))
    outputs = collect_outputs(session)
    (failed,) = outputs["bad"]
    assert (failed.finish_reason, failed.error_code) == ("error", "nan_logits")
    assert "not numbers" in (failed.error or "")
    assert token_ids(outputs["good"]) == greedy(prompt(2, 4), 15)


@pytest.mark.parametrize("mode", ["fixed", "threshold:0.3", "stale_topk"])
def test_step_nan_draft_costs_its_request_the_drafts_only(mode: str) -> None:
    session = make(mode, engine=FakeEngine(nan_draft=63))
    session.add(Request("bad", [63, 1, 2], SamplingParams(max_tokens=15)))
    session.add(Request("good", prompt(2, 4), SamplingParams(max_tokens=15)))
    outputs = collect_outputs(session)
    assert token_ids(outputs["bad"]) == greedy([63, 1, 2], 15)
    assert outputs["bad"][-1].stats.acceptance.verified == 0
    assert token_ids(outputs["good"]) == greedy(prompt(2, 4), 15)
    assert outputs["good"][-1].stats.acceptance.accepted > 0


@pytest.mark.parametrize("fail_after", [1, 2, 3, 5])
def test_step_engine_failure_ends_every_request_with_an_error(fail_after: int) -> None:
    session = make("fixed", engine=FakeEngine(fail_after=fail_after, max_batch_size=2))
    for name in "abc":
        session.add(Request(name, prompt(1, 4), SamplingParams(max_tokens=30)))
    outputs = collect_outputs(session)
    assert {rows[-1].error_code for rows in outputs.values()} == {"engine_failed"}
    assert len(outputs) == 3
    assert session.failure is not None
    with pytest.raises(DeviceError, match="planted failure"):
        session.add(Request("d", [1]))


def test_submit_twice_is_refused() -> None:
    session = make()
    session.add(Request("a", [1]))
    session.submit()
    with pytest.raises(RuntimeError, match="collect"):
        session.submit()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request("x", []), "prompt_empty"),
        (Request("x", [1] * 96), "prompt_too_long"),
        (Request("x", [64]), "token_out_of_vocab"),
        (Request("x", [-1]), "token_out_of_vocab"),
        (Request("x", [1.5]), "token_out_of_vocab"),  # type: ignore[list-item]
        (Request("x", [True]), "token_out_of_vocab"),
        (Request("x", "abc"), "token_out_of_vocab"),  # type: ignore[arg-type]
        (Request("x", [1], SamplingParams(stop_token_ids=[64])), "token_out_of_vocab"),
        (Request("x", [1], SamplingParams(stop=["a"])), "invalid_stop"),
        (Request("taken", [1]), "duplicate_request_id"),
    ],
)
def test_add_bad_request_is_refused_and_leaves_others_alone(request_: Request, code: str) -> None:
    session = make("fixed")
    session.add(Request("taken", prompt(1, 4), SamplingParams(max_tokens=7)))
    with pytest.raises(RequestError) as caught:
        session.add(request_)
    assert caught.value.code == code
    assert token_ids(collect_outputs(session)["taken"]) == greedy(prompt(1, 4), 7)


def test_add_finished_request_id_can_be_used_again() -> None:
    session = make("fixed")
    for _ in range(3):
        session.add(Request("same", prompt(1, 4), SamplingParams(max_tokens=3)))
        assert token_ids(collect_outputs(session)["same"]) == greedy(prompt(1, 4), 3)


@pytest.mark.parametrize(
    ("engine", "speculation", "message"),
    [
        (FakeEngine(has_drafter=False), "fixed", "needs a drafter"),
        (FakeEngine(has_confidence=False), "threshold", "confidence head"),
        (FakeEngine(), "fixed:5", "at most 4"),
        (FakeEngine(), "nonsense", "not known"),
    ],
)
def test_session_impossible_speculation_is_refused(engine: FakeEngine, speculation: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Session(engine, None, speculation=speculation)


@pytest.mark.parametrize("token", [-1, 99_999])
def test_session_end_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ConfigError, match=f"end-of-sequence token {token} is outside"):
        Session(FakeEngine(), None, eos_token_ids=(5, token))


def test_session_unknown_acceptance_is_refused() -> None:
    with pytest.raises(ConfigError, match="acceptance 'typical'"):
        Session(FakeEngine(), None, acceptance="typical")  # type: ignore[arg-type]


def test_step_off_never_touches_the_drafter() -> None:
    engine = FakeEngine()
    session = make("off", engine=engine)
    session.add(Request("a", prompt(1, 4), SamplingParams(max_tokens=6)))
    collect_outputs(session)
    assert set(engine.passes) == {"verify"}


def test_step_request_without_speculation_is_not_drafted_for() -> None:
    engine = FakeEngine()
    session = make("fixed", engine=engine)
    session.add(Request("a", prompt(1, 4), SamplingParams(max_tokens=6, speculation=False)))
    outputs = collect_outputs(session)["a"]
    assert set(engine.passes) == {"verify"}
    assert outputs[-1].stats.acceptance.drafted == 0
    assert [len(batch.token_ids) for batch in engine.verified[1:]] == [1] * 5


def test_step_no_slot_is_lost_over_random_traffic() -> None:
    import random

    rng = random.Random(0)
    session = make("fixed", engine=FakeEngine(max_batch_size=3, max_num_tokens=14))
    wanted: dict[str, list[int]] = {}
    seen: dict[str, list[int]] = {}
    cancelled = set()
    for turn in range(600):
        if turn < 500 and rng.random() < 0.4:
            name, length, count = f"r{turn}", rng.randint(1, 30), rng.randint(1, 25)
            params = SamplingParams(max_tokens=count, speculation=rng.random() < 0.8)
            wanted[name] = greedy(prompt(turn, length), count)
            session.add(Request(name, prompt(turn, length), params))
        if wanted and rng.random() < 0.1:
            name = rng.choice(list(wanted))
            if session.cancel(name):
                cancelled.add(name)
        for output in session.step():
            seen.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert not session.has_unfinished()
    assert (session.num_running, session.num_free_slots) == (0, 3)
    assert len(wanted) > 100
    assert cancelled
    for name, tokens in wanted.items():
        got = seen.get(name, [])
        assert got == (tokens[: len(got)] if name in cancelled else tokens)


def test_sessions_over_one_engine_take_turns_only_between_requests() -> None:
    """Both begin at slot 0: the second would write over what the first has cached, and its text would change."""
    engine = FakeEngine()
    first = Session(engine, None, speculation="fixed")
    first.add(Request("a", [3, 1, 4], SamplingParams(max_tokens=8)))
    first.step()
    for second in (first.sibling(speculation="off"), Session(engine, None)):
        with pytest.raises(RuntimeError, match="another session over this engine is busy .1 unfinished requests"):
            second.add(Request("b", [2, 7], SamplingParams(max_tokens=8)))
        assert not second.has_unfinished()
    first.cancel("a")
    with pytest.raises(RuntimeError, match="step it until they have ended, cancelled ones too"):
        second.add(Request("b", [2, 7], SamplingParams(max_tokens=8)))
    first.step()
    second.add(Request("b", [2, 7], SamplingParams(max_tokens=8)))
    assert token_ids(collect_outputs(second)["b"]) == greedy([2, 7], 8)
    # One that was dropped, requests and all, holds nothing up.
    second.add(Request("c", [2, 7], SamplingParams(max_tokens=8)))
    del second
    gc.collect()
    first.add(Request("d", [3, 1], SamplingParams(max_tokens=8)))
    assert token_ids(collect_outputs(first)["d"]) == greedy([3, 1], 8)
