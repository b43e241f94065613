"""Coupled mode: the output is a function of target and noise, so no schedule can bend its law."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from helpers.coupling import joint_law
from helpers.decisions import CoreDecisions, ReferenceDecisions, core_draft, core_heads, core_sampling
from helpers.enumeration import Decisions, Rule, World, target_law

from trtllm_dspark import _core
from trtllm_dspark.reference.acceptance import accept_greedy
from trtllm_dspark.reference.sampling import race

STEP = (0.0, 10.0, 15.0, 16.0)
RULES = {
    "fixed": Rule("fixed", draft_len=2),
    "threshold": Rule("threshold", threshold=0.35),
    "early_stop": Rule("early_stop", step_time_us=STEP),
    "stale_topk": Rule("stale_topk", budget=1),
    "fresh_search": Rule("fresh_search", step_time_us=STEP),
}


def random_laws(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    draft, target = rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))
    return draft, target


def test_joint_law_has_both_laws_as_margins() -> None:
    rng = np.random.default_rng(3)
    for size in (2, 3, 5):
        draft, target = random_laws(rng, size)
        joint = joint_law(draft, target)
        assert np.abs(joint.sum(1) - draft).max() < 1e-12
        assert np.abs(joint.sum(0) - target).max() < 1e-12
    reduced = np.array([0.4, 0.0, 0.6])
    assert np.abs(joint_law(reduced, np.ones(3) / 3).sum(0) - 1 / 3).max() < 1e-12


def test_joint_law_is_what_races_do() -> None:
    rng = np.random.default_rng(4)
    draft, target = random_laws(rng, 3)
    counts = np.zeros((3, 3))
    for noise in rng.exponential(size=(20000, 3)):
        counts[race(draft, noise), race(target, noise)] += 1
    assert np.abs(counts / 20000 - joint_law(draft, target)).max() < 5 * 0.5 / np.sqrt(20000)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("seed", [30, 31])
def test_coupled_output_law_is_the_targets(rule: Rule, seed: int) -> None:
    decide: Decisions = ReferenceDecisions()
    world = World(seed)
    tree = decide.draft(world, ())
    law = np.zeros((3, 3, 3))
    first = joint_law(tree.laws[()], decide.target(world, ()))
    for x1, y1 in product(range(3), repeat=2):
        second = joint_law(tree.laws[(x1,)], decide.target(world, (y1,)))
        (length,) = decide.verify_len(rule, tree.confidence[(x1,)][None], None)
        for x2, y2, y3 in product(range(3), repeat=3):
            chance = first[x1, y1] * second[x2, y2] * decide.target(world, (y1, y2))[y3]
            emitted = accept_greedy([y1, y2, y3][: length + 1], [x1, x2][:length])
            # A later round races over the same noise at the positions this one left open.
            law[(*emitted, *(y1, y2, y3)[len(emitted) :])] += chance
    assert np.abs(law - target_law(decide, world, 3)).max() < 1e-12


@pytest.mark.parametrize("acceptance", ["coupled", "greedy"])
@pytest.mark.parametrize("seed", [32, 33, 34])
def test_core_output_is_the_undrafted_one_for_every_draft_and_length(acceptance: str, seed: int) -> None:
    """Every draft block and every verify length: with these, no schedule whatsoever can change a token."""
    world = World(seed)
    seeds = np.arange(200, dtype=np.uint64) + 1000 * seed
    sampling = core_sampling(world, seeds)
    plain = plain_tokens(world, sampling, acceptance)
    for drafts in product(range(3), repeat=2):
        tokens = np.tile(drafts, (len(seeds), 1))
        rows = np.array([world.target_logits(drafts[:k]) for k in range(3)])
        for length in range(3):
            accepted = _core.accept_ragged(
                np.tile(rows[: length + 1], (len(seeds), 1)), np.full(len(seeds), length),
                np.full(len(seeds), world.position), sampling, draft_tokens=tokens, acceptance=acceptance,
            )  # fmt: skip
            for r, emitted in enumerate(accepted.emitted_len.tolist()):
                assert accepted.tokens[r, :emitted].tolist() == plain[r][:emitted]
                assert emitted == length + 1 or accepted.tokens[r, emitted - 1] != drafts[emitted - 1]


def plain_tokens(world: World, sampling: _core.Sampling, acceptance: str) -> list[list[int]]:
    """Return three tokens of each request, one pass a token, nothing drafted."""
    sequences: list[list[int]] = [[] for _ in range(sampling.num_requests)]
    for step in range(3):
        logits = np.array([world.target_logits(tuple(past)) for past in sequences])
        accepted = _core.accept_ragged(
            logits, np.zeros(len(sequences), np.int64), np.full(len(sequences), world.position + step), sampling,
            draft_tokens=np.zeros((len(sequences), 0), np.int64), acceptance=acceptance,
        )  # fmt: skip
        for past, token in zip(sequences, accepted.tokens[:, 0].tolist(), strict=True):
            past.append(token)
    return sequences


def test_core_coupled_draft_agrees_as_often_as_the_joint_law_says() -> None:
    """The drafter must race over the target's noise: independent noise would agree with probability sum p q."""
    world, decide = World(35), CoreDecisions()
    seeds = np.arange(20000, dtype=np.uint64)
    draft, _ = core_draft(world, core_heads(world), (), seeds, acceptance="coupled")
    target = decide.target(world, ())
    own = np.array([_core.coupled_pick(target, int(s), world.position + 1) for s in seeds])
    q, p = (row / row.sum() for row in (draft.masses(0, 0), target))
    agree = np.mean(draft.tokens[:, 0] == own)
    expected, blind = float(np.trace(joint_law(q, p))), float(p @ q)
    assert abs(agree - expected) < 5 * 0.5 / np.sqrt(len(seeds))
    assert abs(expected - blind) > 20 * 0.5 / np.sqrt(len(seeds)), "choose a world where the two differ"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_core_greedy_requests_emit_the_argmax_path(rule: Rule) -> None:
    world = World(36, temperature=0.0)
    seeds = np.arange(4, dtype=np.uint64)
    draft, chances = core_draft(world, core_heads(world), (), seeds)
    lengths = np.array(CoreDecisions().verify_len(rule, chances[:1], None) * 4)
    drafts = tuple(draft.tokens[0].tolist())
    rows = np.array([world.target_logits(drafts[:k]) for k in range(int(lengths[0]) + 1)])
    accepted = _core.accept_ragged(
        np.tile(rows, (4, 1)), lengths, np.full(4, world.position), core_sampling(world, seeds), draft=draft
    )
    path = [int(np.argmax(world.target_logits(())))]
    while len(path) < 3:
        path.append(int(np.argmax(world.target_logits(tuple(path)))))
    for r, emitted in enumerate(accepted.emitted_len.tolist()):
        assert accepted.tokens[r, :emitted].tolist() == path[:emitted]
