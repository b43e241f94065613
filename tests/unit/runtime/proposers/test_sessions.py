"""Sessions whose drafts come from a lookup or another model: same tokens as plain decoding, caches without a slip."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import fake_engine
from helpers.fake_engine import VOCAB, FakeEngine, collect_outputs, greedy, token_ids

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.proposers import DraftModelProposer, NgramProposer
from trtllm_dspark.speculation.cost_table import CostTable, DraftShape, VerifyShape

MODES = ["fixed", "fixed:2", "threshold:0.3", "stale_topk:3", "adaptive"]
Make = Callable[..., Any]


def plain_engine(**options: Any) -> FakeEngine:
    return FakeEngine(**{"has_drafter": False, "max_num_tokens": 40, **options})


def ngram(**options: Any) -> Make:
    return partial(NgramProposer, **options)


def draft_model(engine: FakeEngine | None = None, **options: Any) -> Make:
    return partial(DraftModelProposer, engine or plain_engine(), **options)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 17 + index * 5) % VOCAB for index in range(length)]


@pytest.fixture
def periodic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target repeat what stood five tokens before, so that a lookup finds it."""
    monkeypatch.setattr(fake_engine, "next_token", lambda prefix: prefix[-5] if len(prefix) >= 5 else len(prefix))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", [ngram, draft_model])
@pytest.mark.parametrize("own_drafter", [False, True])
def test_mixed_traffic_every_request_equals_itself_alone(mode: str, drafter: Make, own_drafter: bool) -> None:
    session = Session(plain_engine(has_drafter=own_drafter), None, speculation=mode, drafter=drafter())
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


@pytest.mark.usefixtures("periodic")
def test_lookup_finds_what_repeats() -> None:
    session = Session(plain_engine(), None, speculation="fixed", drafter=ngram(max_draft_len=4))
    session.add(Request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=41)))
    tokens = token_ids(collect_outputs(session)["a"])
    assert tokens == [1, 2, 3, 4, 5] * 8 + [1]
    # The first token came with the prompt; the lookup already knew what follows it.
    assert session.stats.acceptance.rounds == 40 / 5
    assert session.stats.acceptance.accepted == session.stats.acceptance.verified == 32


def test_lookup_without_a_match_verifies_nothing() -> None:
    session = Session(plain_engine(), None, speculation="fixed", drafter=ngram())
    session.add(Request("a", [1], SamplingParams(max_tokens=2)))
    collect_outputs(session)
    assert session.stats.acceptance.verified == 0


@pytest.mark.usefixtures("periodic")
def test_lookup_learns_how_far_to_trust_a_match() -> None:
    engine = plain_engine(max_seq_len=300)
    make = ngram(max_draft_len=4)
    proposers: list[NgramProposer] = []

    def keep(*args: Any) -> NgramProposer:
        proposers.append(make(*args))
        return proposers[-1]

    session = Session(engine, None, speculation="fixed", drafter=keep)
    session.add(Request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=250)))
    collect_outputs(session)
    trusted = proposers[0]._worth.rates(4)
    # Matches of three tokens were always right; of one token only the first round's.
    assert trusted[3].min() > 0.9
    assert np.all(trusted[0] == 0.5)


@pytest.mark.parametrize("batch", [1, 3])
def test_draft_model_equal_to_the_target_has_every_draft_accepted(batch: int) -> None:
    session = Session(plain_engine(), None, speculation="fixed", drafter=draft_model(max_draft_len=4))
    for index in range(batch):
        session.add(Request(str(index), prompt(index, 7 + index), SamplingParams(max_tokens=31)))
    outputs = collect_outputs(session)
    for index in range(batch):
        assert token_ids(outputs[str(index)]) == greedy(prompt(index, 7 + index), 31)
    stats = session.stats.acceptance
    assert stats.accepted == stats.verified > 0
    assert stats.rounds == batch * 30 / 5


def test_draft_model_follows_requests_that_move_and_end() -> None:
    draft_engine = plain_engine()
    session = Session(plain_engine(), None, speculation="fixed", drafter=draft_model(draft_engine, max_draft_len=3))
    for index, count in enumerate((3, 40, 9, 25, 30, 12)):
        session.add(Request(str(index), prompt(index, 4), SamplingParams(max_tokens=count)))
    outputs = collect_outputs(session)
    assert [token_ids(outputs[str(i)]) for i in range(6)] == [
        greedy(prompt(index, 4), count) for index, count in enumerate((3, 40, 9, 25, 30, 12))
    ]
    assert "copy" in draft_engine.passes
    # A slip in the draft model's cache would show as a rejected draft.
    assert session.stats.acceptance.accepted == session.stats.acceptance.verified


def test_draft_model_runs_to_the_end_of_the_slot() -> None:
    session = Session(
        plain_engine(max_seq_len=24), None, speculation="fixed", drafter=draft_model(plain_engine(max_seq_len=24))
    )
    for index, length in enumerate((3, 15)):
        session.add(Request(str(index), prompt(index, length), SamplingParams(max_tokens=24 - length)))
    outputs = collect_outputs(session)
    for index, length in enumerate((3, 15)):
        assert token_ids(outputs[str(index)]) == greedy(prompt(index, length), 24 - length)


def test_draft_model_catches_up_with_a_prompt_longer_than_its_pass() -> None:
    draft_engine = plain_engine(max_num_tokens=5, max_batch_size=4)
    session = Session(plain_engine(), None, speculation="fixed", drafter=draft_model(draft_engine, max_draft_len=3))
    session.add(Request("a", prompt(1, 33), SamplingParams(max_tokens=20)))
    assert token_ids(collect_outputs(session)["a"]) == greedy(prompt(1, 33), 20)
    assert session.stats.acceptance.accepted == session.stats.acceptance.verified


def test_close_releases_the_draft_model() -> None:
    draft_engine = plain_engine()
    session = Session(plain_engine(), None, speculation="fixed", drafter=draft_model(draft_engine))
    session.close()
    assert draft_engine.passes == ["close"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (draft_model(plain_engine(max_batch_size=2)), "the draft model's engine has --max_batch_size 2"),
        (draft_model(plain_engine(max_seq_len=50)), "the draft model's engine has --max_seq_len 50"),
        (draft_model(max_draft_len=10), "10 drafts a request do not fit: a pass of 40 tokens over 4 requests"),
        (ngram(max_draft_len=0), "0 drafts a request do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(make: Make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Session(plain_engine(), None, speculation="fixed", drafter=make)


def test_sampled_output_follows_the_target_with_certain_drafts() -> None:
    """Chi-square of the tokens behind the first against the target's law: the likely, the proposed, any other one."""
    logit = 4.0
    engine = plain_engine(max_seq_len=80, logit=logit, max_batch_size=8, max_num_tokens=96)
    session = Session(engine, None, speculation="fixed:2", drafter=ngram(max_draft_len=2))
    # Behind a prompt of all tokens in order, t is always followed by the drafts t + 1, t + 2.
    start = list(range(VOCAB))
    for seed in range(2500):
        session.add(Request(str(seed), start, SamplingParams(max_tokens=3, temperature=1.0, seed=seed)))
    counts = np.zeros(3)
    for outputs in collect_outputs(session, max_rounds=10_000).values():
        tokens = token_ids(outputs)
        likely, proposed = fake_engine.next_token([*start, tokens[0]]), (tokens[0] + 1) % VOCAB
        if likely != proposed and tokens[0] != VOCAB - 1:
            counts[0 if tokens[1] == likely else 1 if tokens[1] == proposed else 2] += 1
    assert session.stats.acceptance.verified > 2000
    weights = np.array([np.exp(logit), 1.0, VOCAB - 2.0])
    expected = counts.sum() * weights / weights.sum()
    # 0.999 quantile of two degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 13.8


def test_draft_model_that_is_not_used_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = CostTable({VerifyShape(1, tokens, tokens, 0): 100.0 for tokens in (1, 4)}, {DraftShape(1, 0): 10.0})
    draft_engine = plain_engine()
    session = Session(plain_engine(), None, speculation="adaptive", drafter=draft_model(draft_engine), cost_table=flat)
    session.add(Request("a", prompt(1, 3), SamplingParams(max_tokens=5)))
    assert token_ids(collect_outputs(session)["a"]) == greedy(prompt(1, 3), 5)
    assert session.stats.acceptance.drafted == 0
    assert draft_engine.passes == ["close"]
    refused = plain_engine()
    with pytest.raises(ConfigError, match="asks for 9 drafts"):
        Session(plain_engine(), None, speculation="fixed:9", drafter=draft_model(refused))
    assert refused.passes == ["close"]


def test_sibling_that_never_drafts_leaves_the_draft_model_to_the_others() -> None:
    flat = CostTable({VerifyShape(1, tokens, tokens, 0): 100.0 for tokens in (1, 4)}, {DraftShape(1, 0): 10.0})
    draft_engine = plain_engine()
    first = Session(plain_engine(), None, speculation="off", drafter=draft_model(draft_engine), cost_table=flat)
    drafting, plain = first.sibling(speculation="fixed"), first.sibling(speculation="adaptive")
    assert plain.controller.draft_len == 0
    with pytest.raises(ConfigError, match="asks for 9 drafts"):
        first.sibling(speculation="fixed:9")
    drafting.add(Request("a", prompt(1, 3), SamplingParams(max_tokens=5)))
    assert token_ids(collect_outputs(drafting)["a"]) == greedy(prompt(1, 3), 5)
    assert drafting.stats.acceptance.accepted > 0
    assert "close" not in draft_engine.passes
    plain.close()
    assert draft_engine.passes[-1] == "close"


@pytest.mark.parametrize(("drafter", "distinct"), [(ngram, True), (draft_model, False)])
def test_equal_seeds_are_told_apart_where_outcomes_of_others_decide(drafter: Make, distinct: bool) -> None:
    engine = plain_engine(max_num_tokens=200)
    session = Session(engine, None, speculation="threshold:0.5", drafter=drafter(max_draft_len=2))
    for name in "ab":
        session.add(Request(name, prompt(1, 3), SamplingParams(max_tokens=5, temperature=1.0, seed=7)))
    first, second = (session._requests[name].seed for name in "ab")
    assert (first != second) == distinct
