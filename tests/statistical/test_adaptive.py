"""`adaptive` keeps the target's law while calibration, load, measured times and its own statistics change under it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers.adaptive_loop import AdaptiveScheduler, Group, adaptive_controller
from helpers.chi_square import chi_square_p, count_tuples
from helpers.decisions import CoreDecisions, ReferenceDecisions
from helpers.enumeration import Decisions, Tokens, World, blocks, emissions, target_law
from helpers.toy_loop import accept_with_core, decode, random_tables, sequence_law

from trtllm_dspark import _core
from trtllm_dspark.speculation import SpeculationController

TOLERANCE = 1e-12
GATE = 1e-6
SAMPLES = 2000
GROUP = 8


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_loop_output_follows_the_target_law_in_adaptive_mode(acceptance: str) -> None:
    tables = random_tables(5)
    law = sequence_law(tables, 1.0, 6)
    worst, reasons = 1.0, set()
    for seed in range(5):
        seeds = np.random.default_rng(seed).integers(0, 2**63, SAMPLES, np.int64).astype(np.uint64)
        sampling = _core.Sampling(np.full(SAMPLES, 1.0, np.float32), seeds)
        scheduler = AdaptiveScheduler(GROUP, lambda: adaptive_controller(GROUP, tables.gamma))
        accept = scheduler.accept_with(accept_with_core(acceptance))
        tokens = decode(tables, sampling, scheduler, accept, 6, acceptance=acceptance)
        early, late = count_tuples(tokens[:, :3], tables.vocab), count_tuples(tokens[:, 3:], tables.vocab)
        worst = min(worst, chi_square_p(early, law.sum(axis=(3, 4, 5))), chi_square_p(late, law.sum(axis=(0, 1, 2))))
        reasons |= scheduler.reasons
        assert 0 < sum(scheduler.verified) < tables.gamma * SAMPLES * len(scheduler.verified)
    assert worst > GATE
    assert {"speculate", "load"} <= reasons


class Cheating(SpeculationController):
    """Looks at the last confidence of this round's block before it decides about the first draft."""

    def verify_lens(self, plan, requests, *, caps, confidence, depth):  # type: ignore[no-untyped-def]
        lengths = super().verify_lens(plan, requests, caps=caps, confidence=confidence, depth=depth)
        return np.where(confidence[:, -1] > 0.5, lengths, 0)


def rounds_law(decide: Decisions, world: World, controller: SpeculationController, horizon: int) -> np.ndarray:
    """Return the law of the first tokens of a request through as many rounds as they take, every branch integrated."""
    law = np.zeros((world.vocab,) * horizon)

    def play(prefix: Tokens, group: Group, chance: float) -> None:
        if len(prefix) >= horizon:
            law[prefix[:horizon]] += chance
            return
        tree = decide.draft(world, prefix)
        for drafts, drafted in blocks(decide, tree):
            decided = copy.deepcopy(group)
            length = int(decided.schedule(np.asarray(tree.confidence[drafts[:-1]], np.float32)[None])[0])
            after: dict[int, Group] = {}
            for tokens, emitted in emissions(decide, world, prefix, tree, drafts, length):
                accepted = len(tokens) - 1
                if accepted not in after:
                    after[accepted] = copy.deepcopy(decided)
                    after[accepted].observe(np.array([accepted]))
                play(prefix + tokens, after[accepted], chance * drafted * emitted)

    play((), Group(controller, [0]), 1.0)
    return law


@pytest.mark.parametrize("decide", [ReferenceDecisions(), CoreDecisions()], ids=["reference", "core"])
@pytest.mark.parametrize("seed", [43, 73])
def test_rejection_over_many_rounds_keeps_the_law_in_adaptive_mode(decide: Decisions, seed: int) -> None:
    world = World(seed, vocab=2)
    law = rounds_law(decide, world, adaptive_controller(1, world.gamma), horizon=4)
    assert np.abs(law - target_law(decide, world, 4)).max() < TOLERANCE


def test_rejection_schedule_that_looks_ahead_is_biased() -> None:
    """The enumeration sees a controller that decides from the block it decides about."""
    decide, worst, seed = ReferenceDecisions(), 0.0, 0
    while worst < 0.01 and seed < 12:
        world = World(seed, vocab=2)
        controller = adaptive_controller(1, world.gamma)
        controller.__class__ = Cheating
        law = rounds_law(decide, world, controller, horizon=3)
        worst = max(worst, float(np.abs(law - target_law(decide, world, 3)).max()))
        seed += 1
    assert worst >= 0.01


def test_adaptive_schedules_really_depend_on_the_past() -> None:
    """Without this the laws above would prove nothing."""
    lengths = set()
    for seed in range(6):
        group = Group(adaptive_controller(1, 2), [0])
        rng = np.random.default_rng(seed)
        block = np.array([[0.55, 0.5]], np.float32)
        for _ in range(6):
            first = group.schedule(rng.uniform(0.05, 0.95, (1, 2)).astype(np.float32))
            group.observe(np.minimum(first, rng.integers(0, 3, 1)))
        while group.schedule(block) is not None and group.plan is not None and group.plan.reason != "speculate":
            group.observe(np.zeros(1, np.int64))
            if group.rounds > 40:
                break
        assert group.lengths is not None
        lengths.add((int(group.lengths[0]), group.plan.reason if group.plan else ""))
    assert len(lengths) > 1
