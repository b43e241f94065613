"""The paper's Appendix A: a global search over fresh confidences turns 0.700 into 0.850; early stop keeps it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from helpers.coupling import joint_law
from helpers.decisions import CoreDecisions, ReferenceDecisions
from helpers.enumeration import Decisions, Rule, Tokens, Tree, World, blocks, emissions

from trtllm_dspark.reference.acceptance import accept_greedy

TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)
COST = (0.0, 1 / 1.0, 1 / 0.5, 1 / 0.45)
EARLY_STOP, SEARCH = Rule("early_stop", step_time_us=COST), Rule("fresh_search", step_time_us=COST)
CONFIDENCE = {(0,): np.array([0.8, 0.9]), (1,): np.array([0.8, 0.0])}
"""c_2 is 0.9 when the first draft token is A (0) and 0 when it is B (1)."""


class Fixture:
    """The decisions of an implementation, with the paper's laws in place of a model's."""

    def __init__(self, decide: Decisions, masses: bool) -> None:
        self.decide, self.masses = decide, masses

    def __getattr__(self, name: str) -> object:
        return getattr(self.decide, name)

    def row(self, law: Sequence[float]) -> np.ndarray:
        return np.array([round(10 * p) for p in law], np.uint64) if self.masses else np.array(law)

    def target(self, world: World, prefix: Tokens) -> np.ndarray:
        return self.row(TARGET)

    def draft(self, world: World, prefix: Tokens) -> Tree:
        return Tree({(): self.row(DRAFT), (0,): self.row(DRAFT), (1,): self.row(DRAFT)}, CONFIDENCE)


@pytest.fixture(params=["reference", "core"])
def decide(request: pytest.FixtureRequest) -> Fixture:
    core = request.param == "core"
    return Fixture(CoreDecisions() if core else ReferenceDecisions(), masses=core)


def first_token_law(decide: Fixture, rule: Rule) -> list[float]:
    world, law = World(0, vocab=2), [0.0, 0.0]
    tree = decide.draft(world, ())
    for drafts, chance in blocks(decide, tree):  # type: ignore[arg-type]
        (length,) = decide.verify_len(rule, CONFIDENCE[drafts[:1]][None], None)  # type: ignore[operator]
        for tokens, share in emissions(decide, world, (), tree, drafts, length):  # type: ignore[arg-type]
            law[tokens[0]] += chance * share
    return law


def test_appendix_a_early_stop_admits_nothing_and_keeps_the_law(decide: Fixture) -> None:
    for confidence in CONFIDENCE.values():
        assert decide.verify_len(EARLY_STOP, confidence[None], None) == [0]  # type: ignore[operator]
    assert first_token_law(decide, EARLY_STOP) == pytest.approx([0.7, 0.3], abs=1e-12)


def test_appendix_a_retrospective_search_gives_the_papers_wrong_law(decide: Fixture) -> None:
    assert decide.verify_len(SEARCH, CONFIDENCE[(0,)][None], None) == [2]  # type: ignore[operator]
    assert decide.verify_len(SEARCH, CONFIDENCE[(1,)][None], None) == [0]  # type: ignore[operator]
    assert first_token_law(decide, SEARCH) == pytest.approx([0.85, 0.15], abs=1e-12)


def test_appendix_a_coupled_mode_survives_the_retrospective_search(decide: Fixture) -> None:
    law = [0.0, 0.0]
    cells = joint_law(np.array(DRAFT), np.array(TARGET))
    for draft, own in np.ndindex(2, 2):
        (length,) = decide.verify_len(SEARCH, CONFIDENCE[(draft,)][None], None)  # type: ignore[operator]
        # Whatever stands in the second slot, the first emitted token is decided by the first row.
        emitted = accept_greedy([own, 0, 0][: length + 1], [draft, 0][:length])
        law[emitted[0]] += cells[draft, own]
    assert law == pytest.approx([0.7, 0.3], abs=1e-12)
