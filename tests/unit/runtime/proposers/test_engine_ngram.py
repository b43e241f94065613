"""The engine's blocks and prompt lookup together: same tokens and law whichever drafts, and the better one drafts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import fake_engine
from helpers.fake_engine import VOCAB, FakeEngine, collect_outputs, token_ids
from helpers.virtual_engine import VirtualEngine

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.proposers import EngineNgramProposer
from trtllm_dspark.runtime.proposers._worth import Worth

MODES = ["fixed", "fixed:2", "threshold:0.3", "early_stop", "stale_topk:3", "adaptive"]
hashed = fake_engine.next_token


@pytest.fixture(autouse=True)
def some_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let texts that begin with an even token repeat what stood five tokens before; the others never do for long."""

    def following(prefix: list[int]) -> int:
        return prefix[-5] if len(prefix) >= 5 and prefix[0] % 2 == 0 else hashed(prefix)

    monkeypatch.setattr(fake_engine, "next_token", following)


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(**{"max_num_tokens": 40, "max_seq_len": 200, **options})


def prompt(first: int, length: int) -> list[int]:
    return [first, *((first * 17 + index * index * 5) % VOCAB for index in range(1, length))]


def outputs(
    session: Session, *, acceptance_temperature: float = 0.0
) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Return tokens and log-probabilities of mixed traffic: more requests than slots, all kinds of limits."""
    for index in range(14):
        params = SamplingParams(
            max_tokens=1 + index * 11 % 60,
            min_tokens=1,
            speculation=index % 5 != 4,
            max_draft_len=None if index % 3 else index % 5,
            logprobs=index % 4 == 0,
            temperature=acceptance_temperature,
            seed=index,
        )
        session.add(Request(str(index), prompt(index, 2 + index * 7 % 40), params))
    rows = collect_outputs(session)
    values = {name: [value for row in some for value in row.logprobs or []] for name, some in rows.items()}
    return {name: token_ids(some) for name, some in rows.items()}, values


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_without_drafts(mode: str) -> None:
    plain = outputs(Session(engine(), None, speculation="off"))
    assert outputs(Session(engine(), None, speculation=mode, drafter=EngineNgramProposer)) == plain


@pytest.mark.parametrize("mode", ["fixed", "threshold:0.3", "adaptive"])
def test_coupled_tokens_are_those_without_drafts(mode: str) -> None:
    plain = outputs(
        Session(engine(logit=4.0), None, speculation="off", acceptance="coupled"), acceptance_temperature=1.0
    )
    session = Session(engine(logit=4.0), None, speculation=mode, acceptance="coupled", drafter=EngineNgramProposer)
    assert outputs(session, acceptance_temperature=1.0) == plain


def test_rounds_hold_both_kinds_and_each_request_keeps_its_own() -> None:
    """A repeating text beside one that does not: the first costs no block of its own, the second loses none."""
    kinds: list[tuple[bool, ...]] = []

    class Watched(EngineNgramProposer):
        def propose(self, *args: Any, **options: Any) -> Any:
            draft = super().propose(*args, **options)
            kinds.append(() if draft.certain is None else tuple(draft.certain.tolist()))
            return draft

    session = Session(engine(mistake_every=4), None, speculation="fixed", drafter=Watched)
    for first in (2, 3):
        session.add(Request(str(first), prompt(first, 11), SamplingParams(max_tokens=120)))
    rounds = {name: len(rows) for name, rows in collect_outputs(session).items()}
    assert kinds.count((True, False)) > len(kinds) / 2
    # Five tokens a round of the one, four of the other: each is judged by its own drafts.
    assert rounds["2"] < 120 / 4
    assert rounds["3"] < 120 / 3


def test_a_text_that_repeats_needs_no_block() -> None:
    session = Session(engine(mistake_every=2), None, speculation="fixed", drafter=EngineNgramProposer)
    session.add(Request("a", [2, 4, 6, 8, 10], SamplingParams(max_tokens=150)))
    assert token_ids(collect_outputs(session)["a"]) == [2, 4, 6, 8, 10] * 30
    stats = session.stats
    assert stats.draft_passes < 4
    assert stats.acceptance.accepted > 0.95 * stats.acceptance.verified


def test_what_the_context_absorbs_in_a_round_of_lookups_is_no_part_of_what_they_take() -> None:
    rounds: list[tuple[int, float]] = []
    virtual = VirtualEngine(max_num_tokens=40, max_seq_len=200, mistake_every=2)

    class Watched(EngineNgramProposer):
        def propose(self, *args: Any, **options: Any) -> Any:
            before = virtual.absorbed
            draft = super().propose(*args, **options)
            if draft.result is None:
                rounds.append((virtual.absorbed - before, draft.seconds))
            return draft

    session = Session(virtual, None, speculation="fixed", drafter=Watched, clock=virtual.clock)
    session.add(Request("a", [2, 4, 6, 8, 10], SamplingParams(max_tokens=150)))
    collect_outputs(session)
    assert len(rounds) > 20
    # Every so often the whole backlog is due; a lookup takes nothing on this clock.
    assert max(absorbed for absorbed, _ in rounds) >= 40
    assert {seconds for _, seconds in rounds} == {0.0}


def test_a_drafter_that_is_right_is_not_displaced() -> None:
    session = Session(engine(mistake_every=0), None, speculation="fixed", drafter=EngineNgramProposer)
    session.add(Request("a", prompt(3, 40), SamplingParams(max_tokens=150)))
    collect_outputs(session)
    assert session.stats.draft_passes > 0.8 * session.stats.acceptance.rounds


def test_what_was_not_used_is_learned_from_too() -> None:
    """A lookup that began badly is tried again once the text repeats: it is compared in every round."""
    made: list[EngineNgramProposer] = []

    def keep(*args: Any) -> EngineNgramProposer:
        made.append(EngineNgramProposer(*args))
        made[0]._worth.kept[1:] = 0.1
        return made[0]

    session = Session(engine(mistake_every=2), None, speculation="fixed", drafter=keep)
    session.add(Request("a", [2, 4, 6, 8, 10], SamplingParams(max_tokens=150)))
    collect_outputs(session)
    assert made[0]._worth.rates(4)[3].min() > 0.5
    passes, rounds = session.stats.draft_passes, session.stats.acceptance.rounds
    assert 3 < passes < 0.7 * rounds


@pytest.mark.parametrize("mode", ["fixed", "threshold:0.4", "adaptive"])
def test_sampled_tokens_follow_the_target(mode: str) -> None:
    """Blocks are accepted by their q and lookups by a point mass, in one round: mixing them up shifts the law."""
    logit, likely, count = 4.0, 0, 0
    engine_ = engine(logit=logit, mistake_every=2, max_batch_size=8, max_num_tokens=64)
    session = Session(engine_, None, speculation=mode, drafter=EngineNgramProposer)
    prompts = {str(index): prompt(index % 8, 5 + index % 9) for index in range(160)}
    for name, ids in prompts.items():
        session.add(Request(name, ids, SamplingParams(max_tokens=60, temperature=1.0, seed=int(name))))
    for name, rows in collect_outputs(session).items():
        text = list(prompts[name])
        for token in token_ids(rows):
            likely += token == fake_engine.next_token(text)
            count += 1
            text.append(token)
    assert session.stats.acceptance.verified > 0 or mode == "adaptive"
    chance = math.exp(logit) / (math.exp(logit) + VOCAB - 1)
    assert abs(likely - count * chance) < 4.5 * math.sqrt(count * chance * (1 - chance))


def test_an_engine_without_a_block_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs an engine with a block drafter"):
        Session(engine(has_drafter=False), None, speculation="fixed", drafter=EngineNgramProposer)


def test_online_calibration_is_of_the_engines_drafter_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave one of the two out"):
        Session.open(tmp_path, drafter=EngineNgramProposer, online_calibration=True)


def test_worth_is_the_rate_among_those_that_got_so_far() -> None:
    worth = Worth(2, 3)
    assert worth.rates(3).tolist() == [[0.5] * 3] * 2
    for _ in range(2000):
        worth.compare(1, [5, 6, 7], [5, 6, 9, 1])
    worth.compare(1, [5, 6, 7], [5])
    np.testing.assert_allclose(worth.rates(3), [[0.5] * 3, [1.0, 1.0, 0.0]], atol=1e-3)
    np.testing.assert_allclose(worth.accepted(3), [0.875, 2.0], atol=1e-2)
    # Two tokens were emitted: the third draft was neither right nor wrong.
    before = worth.tried.copy()
    worth.compare(0, [1, 2, 3], [1, 2])
    assert (worth.tried != before).tolist() == [[True, True, False], [False] * 3]
