"""Shares of a limited verify budget in a session: by class and number, never by what another request asks for."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_engine import FakeEngine, greedy

from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.speculation.controller import LoadLimits

PROMPT = [3, 1, 4]


class Budget:
    """A load that leaves so many drafts a round."""

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts

    def limits(self) -> LoadLimits:
        return LoadLimits(verify_budget=self.drafts)


def verified(budget: int, *requests: dict[str, Any], rounds: int = 12, speculation: str = "fixed") -> list[list[int]]:
    """Return by round how many drafts of each request were verified, while all of them run."""
    engine = FakeEngine(max_num_tokens=64)
    session = Session(engine, None, speculation=speculation, load=Budget(budget))
    for index, options in enumerate(requests):
        session.add(Request(str(index), PROMPT, SamplingParams(**{"max_tokens": 90, "ignore_eos": True, **options})))
    tokens: dict[str, list[int]] = {}
    for _ in range(rounds + 1):
        for output in session.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert session.num_running == len(requests)
    for index, options in enumerate(requests):
        if not options.get("temperature"):
            assert tokens[str(index)] == greedy(PROMPT, len(tokens[str(index)]))
    # The first pass is over the prompts.
    return [(batch.row_lens - 1).tolist() for batch in engine.verified[1:]]


def test_interactive_requests_keep_more_of_a_limited_budget() -> None:
    classes: list[dict[str, Any]] = [{"latency_class": name} for name in ("batch", "interactive", "batch", "batch")]
    rounds = verified(7, *classes)
    assert all(sum(lengths) == 7 for lengths in rounds)
    assert {lengths[1] for lengths in rounds} == {4}
    totals = [sum(column) for column in zip(*rounds, strict=True)]
    assert totals[1] > 3 * max(totals[0], totals[2], totals[3])
    # Equals get equal parts over the rounds.
    assert max(totals[0], totals[2], totals[3]) - min(totals[0], totals[2], totals[3]) <= 1


def test_classes_change_nothing_while_the_budget_suffices() -> None:
    assert verified(16, {"latency_class": "batch"}, {}, {"latency_class": "batch"}, {}) == [[4] * 4] * 12


@pytest.mark.parametrize("speculation", ["fixed", "threshold:0.05"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_draft_len": 1},
        {"max_draft_len": 0},
        {"speculation": False},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 1.5, "seed": 2},
        {"temperature": 0.7, "top_k": 3},
    ],
)
def test_options_of_one_request_move_no_budget_of_another(options: dict[str, Any], speculation: str) -> None:
    others: list[dict[str, Any]] = [{}, {}, {"latency_class": "batch"}]
    plain = verified(9, {}, *others, speculation=speculation)
    moved = verified(9, options, *others, speculation=speculation)
    assert [lengths[1:] for lengths in moved] == [lengths[1:] for lengths in plain]


def test_prompts_of_a_round_take_the_same_whatever_drafts_ask_for() -> None:
    """A round's prompt chunk depends on how many requests decode, not on what each may verify."""

    def chunks(options: dict[str, Any]) -> list[int]:
        engine = FakeEngine(max_num_tokens=16)
        session = Session(engine, None, speculation="fixed")
        session.add(Request("a", PROMPT, SamplingParams(max_tokens=60, **options)))
        session.add(Request("b", PROMPT, SamplingParams(max_tokens=60)))
        session.step()
        session.add(Request("c", [7] * 40, SamplingParams(max_tokens=4)))
        before = len(engine.verified)
        for _ in range(3):
            session.step()
        return [int(batch.row_lens[0]) for batch in engine.verified[before:] if batch.first_slot == 2]

    assert chunks({}) == chunks({"max_draft_len": 1}) == chunks({"speculation": False})
