"""The output law equals the target's law to 1e-12: exhaustive, V = 3, gamma = 2, on the reference and on the core."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from helpers.decisions import CoreDecisions, ReferenceDecisions
from helpers.enumeration import Decisions, Rule, World, blocks, round_law, rounds_law, target_law

TOLERANCE = 1e-12
LINEAR = (0.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0)
"""Microseconds of a pass over B tokens; entry 0 is unused."""
STEP = (0.0, 10.0, 15.0, 16.0, 17.0, 21.0, 22.0, 23.0)
"""A second token costs much, a third little: a search that looks ahead jumps the step, Algorithm 1 stops before it."""

RULES = {
    "fixed_2": Rule("fixed", draft_len=2),
    "fixed_1": Rule("fixed", draft_len=1),
    "off": Rule("fixed", draft_len=0),
    "threshold": Rule("threshold", threshold=0.35),
    "early_stop": Rule("early_stop", step_time_us=LINEAR),
    "early_stop_step": Rule("early_stop", step_time_us=STEP),
    "stale_topk_1": Rule("stale_topk", budget=1),
    "stale_topk_2": Rule("stale_topk", budget=2),
    "stale_topk_3": Rule("stale_topk", budget=3),
}
FORBIDDEN = Rule("fresh_search", step_time_us=STEP)
VARIANTS = {
    "dense": World(1),
    "cold": World(2, temperature=0.7),
    "gated": World(3, kind="gated"),
    "rnn": World(4, kind="rnn"),
    "no_markov": World(5, kind="none"),
    "reduced_vocabulary": World(6, d2t=(2, 0)),
    "candidates": World(7, num_candidates=2),
    "top_k": World(8, top_k=2),
    "top_p": World(9, top_p=0.8, temperature=1.3),
}


BATCH = (World(48), World(49, temperature=0.8, position=9))
"""Two requests whose schedules react to each other's drafts; checked below."""
ROUNDS = (World(43, vocab=2), World(73, vocab=2))
"""Requests on which the forbidden schedule goes wrong within three tokens; checked below."""


@pytest.fixture(params=["reference", "core"])
def decide(request: pytest.FixtureRequest) -> Decisions:
    return ReferenceDecisions() if request.param == "reference" else CoreDecisions()


def distance(decide: Decisions, worlds: list[World], rule: Rule) -> float:
    """Largest difference between the joint output law of a batch and the product of its targets' laws."""
    expected = np.array(1.0)
    for world in worlds:
        expected = np.multiply.outer(expected, target_law(decide, world, world.gamma + 1))
    return float(np.abs(round_law(decide, worlds, rule) - expected).max())


def trap(decide: Decisions, worlds: list[World]) -> tuple[float, ...]:
    """Return step times under which only the whole batch of drafts can pay, and only for some draft tokens.

    Appendix A for any batch: Algorithm 1 stops at once, a search over fresh confidences looks at the tokens it judges.
    """
    trees = [decide.draft(world, ()) for world in worlds]
    chances = [{float(np.cumprod(tree.confidence[b[:-1]]).sum()) for b, _ in blocks(decide, tree)} for tree in trees]
    sums = sorted({float(sum(pick)) for pick in product(*chances)})
    size, middle = len(worlds), len(sums) // 2
    never = size + 1.05 * sums[-1]
    return (0.0, *[float(size)] * size, *[never] * (2 * size - 1), size + (sums[middle - 1] + sums[middle]) / 2)


TEMPTED = {name: (world,) for name, world in VARIANTS.items() if world.kind != "none"} | {"batch": BATCH}
"""Without a Markov head no confidence depends on a draft token, and a search does no harm."""


@pytest.mark.parametrize("worlds", TEMPTED.values(), ids=TEMPTED)
def test_rejection_early_stop_keeps_the_law_where_a_search_loses_it(
    decide: Decisions, worlds: tuple[World, ...]
) -> None:
    times = trap(decide, list(worlds))
    assert distance(decide, list(worlds), Rule("early_stop", step_time_us=times)) < TOLERANCE
    assert distance(decide, list(worlds), Rule("fresh_search", step_time_us=times)) > 1e-4


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("world", VARIANTS.values(), ids=VARIANTS)
def test_rejection_alone_keeps_the_target_law(decide: Decisions, world: World, rule: Rule) -> None:
    assert distance(decide, [world], rule) < TOLERANCE


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rejection_batch_of_two_keeps_the_product_law(decide: Decisions, rule: Rule) -> None:
    assert distance(decide, list(BATCH), rule) < TOLERANCE


def test_rejection_schedules_really_depend_on_drafts(decide: Decisions) -> None:
    """Without this the proofs above would prove nothing about causality."""
    trees = [decide.draft(world, ()) for world in BATCH]
    for name in ("threshold", "early_stop", "stale_topk_2"):
        lengths = {
            tuple(decide.verify_len(RULES[name], np.array([a, b]), None))
            for a in trees[0].confidence.values()
            for b in trees[1].confidence.values()
        }
        assert len(lengths) > 1, f"{name} always verifies {lengths}"


def test_rejection_fresh_global_search_is_biased(decide: Decisions) -> None:
    distances = [distance(decide, [World(seed)], FORBIDDEN) for seed in range(12)]
    assert max(distances) > 1e-2, f"the forbidden schedule was not noticed: {distances}"


def test_rejection_wrong_draft_law_is_biased(decide: Decisions) -> None:
    """The verifier must use q exactly as sampled from: here it is told another temperature's q."""

    class Liar:
        def __getattr__(self, name: str) -> object:
            return getattr(decide, name)

        def acceptance(self, target: np.ndarray, draft: np.ndarray, token: int) -> float:
            blurred = draft + np.asarray(draft.sum() // 4 if draft.dtype == np.uint64 else 0.25, draft.dtype)
            return decide.acceptance(target, blurred, token)

    assert distance(Liar(), [World(1)], RULES["fixed_2"]) > 1e-3  # type: ignore[arg-type]


@pytest.mark.parametrize("delay", [1, 2])
def test_rejection_stale_budget_over_many_rounds_keeps_the_law(decide: Decisions, delay: int) -> None:
    rule = Rule("stale_topk", step_time_us=STEP, delay=delay)
    for world in ROUNDS:
        law = rounds_law(decide, world, rule, horizon=4)
        assert np.abs(law - target_law(decide, world, 4)).max() < TOLERANCE


def test_rejection_stale_budget_really_changes_with_the_past(decide: Decisions) -> None:
    rule = Rule("stale_topk", step_time_us=STEP, delay=2)
    for world in ROUNDS:
        chances = [c[None] for past in ((), (0,), (1,)) for c in decide.draft(world, past).confidence.values()]
        assert len({decide.verify_len(rule, chances[0], older)[0] for older in chances}) > 1


def test_rejection_many_rounds_catch_the_fresh_search(decide: Decisions) -> None:
    for world in ROUNDS:
        law, expected = rounds_law(decide, world, FORBIDDEN, 3), target_law(decide, world, 3)
        assert np.abs(law - expected).max() > 0.05
