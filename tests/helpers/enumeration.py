"""Exact output laws of a round: every draft, every acceptance, every replacement, integrated analytically."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import numpy as np

Row = Any
"""A law as an implementation holds it: float64 probabilities or integer masses."""
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """A schedule: `mode` of the core, or `fresh_search` = the forbidden global search on the current confidences."""

    mode: str
    draft_len: int = 0
    threshold: float = 0.0
    step_time_us: tuple[float, ...] = ()
    budget: int = 0
    delay: int = 0
    """stale_topk only: 0 = `budget` as given, n = budget from the confidences n rounds ago (all drafts while none)."""


@dataclass(frozen=True)
class Tree:
    """A drafter's answer to one anchor: the law after every draft prefix, the confidences of every block."""

    laws: dict[Tokens, Row]
    confidence: dict[Tokens, np.ndarray]
    """Keyed by the draft tokens before the last one: no confidence reads the last."""


@dataclass(frozen=True)
class World:
    """Random tables of a toy pair: everything depends on the whole prefix of emitted tokens."""

    seed: int
    vocab: int = 3
    gamma: int = 2
    temperature: float = 1.0
    kind: str = "vanilla"
    d2t: tuple[int, ...] | None = None
    num_candidates: int = 0
    top_k: int = 0
    top_p: float = 1.0
    anchor: int = 1
    position: int = 5
    rank: int = 2
    hidden_size: int = 3
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def _random(self, what: int, prefix: Tokens, shape: tuple[int, ...], scale: float) -> np.ndarray:
        rng = np.random.default_rng([self.seed, what, len(prefix), *prefix])
        return (rng.normal(size=shape) * scale).astype(np.float32)

    @property
    def draft_vocab(self) -> int:
        return self.vocab if self.d2t is None else len(self.d2t)

    def target_logits(self, prefix: Tokens) -> np.ndarray:
        return self._random(0, prefix, (self.vocab,), 1.0)

    def base_logits(self, prefix: Tokens) -> np.ndarray:
        return self._random(1, prefix, (self.gamma, self.draft_vocab), 1.0)

    def hidden(self, prefix: Tokens) -> np.ndarray:
        return self._random(2, prefix, (self.gamma, self.hidden_size), 1.0)

    def head_weights(self) -> dict[str, np.ndarray]:
        r, d = self.rank, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"confidence_weight": (d,)}
        if self.kind != "none":
            shapes = {"confidence_weight": (d + r,), "w1": (self.vocab, r), "w2": (self.draft_vocab, r)}
        if self.kind == "gated":
            shapes |= {"gate_weight": (r, d + r), "gate_bias": (r,)}
        if self.kind == "rnn":
            shapes |= {"rnn_weight": (3 * r, 2 * r + d), "rnn_bias": (3 * r,)}
        return {
            name: self._random(3 + n, (), shape, 1.5 if name == "confidence_weight" else 0.7)
            for n, (name, shape) in enumerate(sorted(shapes.items()))
        }


class Decisions(Protocol):
    """The decisions of an implementation, with its random numbers integrated out."""

    def target(self, world: World, prefix: Tokens) -> Row: ...
    def draft(self, world: World, prefix: Tokens) -> Tree: ...
    def law(self, row: Row) -> np.ndarray:
        """Probability that this row yields each token when it is drawn from."""

    def acceptance(self, target: Row, draft: Row, token: int) -> float: ...
    def residual(self, target: Row, draft: Row) -> np.ndarray:
        """Law of the token that replaces a rejected one."""

    def verify_len(self, rule: Rule, confidence: np.ndarray, older: np.ndarray | None) -> list[int]:
        """Verify lengths for confidences [R, gamma]; `older` is what a delayed budget is computed from."""


def blocks(decide: Decisions, tree: Tree) -> list[tuple[Tokens, float]]:
    """Return every possible draft block with its probability."""
    done: list[tuple[Tokens, float]] = [((), 1.0)]
    while done[0][0] in tree.laws:
        done = [
            ((*drafts, token), chance * share)
            for drafts, chance in done
            for token, share in enumerate(decide.law(tree.laws[drafts]).tolist())
            if share > 0
        ]
    return done


def emissions(
    decide: Decisions, world: World, prefix: Tokens, tree: Tree, drafts: Tokens, verify_len: int
) -> list[tuple[Tokens, float]]:
    """Return every possible emission of one round of rejection acceptance with its probability."""
    outcomes: list[tuple[Tokens, float]] = []
    reached = 1.0
    for step, token in enumerate(drafts[:verify_len]):
        target, draft = decide.target(world, prefix + drafts[:step]), tree.laws[drafts[:step]]
        accepted = decide.acceptance(target, draft, token)
        if accepted < 1:
            for other, share in enumerate(decide.residual(target, draft).tolist()):
                outcomes.append(((*drafts[:step], other), reached * (1 - accepted) * share))
        reached *= accepted
    bonus = decide.law(decide.target(world, prefix + drafts[:verify_len])).tolist()
    outcomes += [((*drafts[:verify_len], token), reached * share) for token, share in enumerate(bonus)]
    return [(tokens, chance) for tokens, chance in outcomes if chance > 0]


def continued(decide: Decisions, world: World, prefix: Tokens, horizon: int, chance: float, into: np.ndarray) -> None:
    """Add to `into` [V] * horizon what the target's own law makes of a prefix from here on."""
    if len(prefix) >= horizon:
        into[prefix[:horizon]] += chance
        return
    for token, share in enumerate(decide.law(decide.target(world, prefix)).tolist()):
        if share > 0:
            continued(decide, world, (*prefix, token), horizon, chance * share, into)


def target_law(decide: Decisions, world: World, horizon: int) -> np.ndarray:
    """Return the law of the first `horizon` tokens without speculation, shape [V] * horizon."""
    law = np.zeros((world.vocab,) * horizon)
    continued(decide, world, (), horizon, 1.0, law)
    return law


def round_law(decide: Decisions, worlds: Sequence[World], rule: Rule) -> np.ndarray:
    """Return the joint law of the first gamma + 1 tokens of all requests after one speculative round of the batch.

    Shape [V] * ((gamma + 1) * R); what the round leaves open is filled up from the target's law.
    """
    horizon = worlds[0].gamma + 1
    trees = [decide.draft(world, ()) for world in worlds]
    joint = np.zeros([world.vocab for world in worlds for _ in range(horizon)])
    laws: dict[tuple[int, Tokens, int], np.ndarray] = {}
    for combination in product(*(blocks(decide, tree) for tree in trees)):
        confidence = np.array([tree.confidence[b[:-1]] for tree, (b, _) in zip(trees, combination, strict=True)])
        lengths = decide.verify_len(rule, confidence, None)
        outer = np.array(np.prod([chance for _, chance in combination]))
        for r, (drafts, _) in enumerate(combination):
            key = (r, drafts, lengths[r])
            if key not in laws:
                laws[key] = np.zeros((worlds[r].vocab,) * horizon)
                for tokens, chance in emissions(decide, worlds[r], (), trees[r], drafts, lengths[r]):
                    continued(decide, worlds[r], tokens, horizon, chance, laws[key])
            outer = np.multiply.outer(outer, laws[key])
        joint += outer
    return joint


def rounds_law(decide: Decisions, world: World, rule: Rule, horizon: int) -> np.ndarray:
    """Return the law of the first `horizon` tokens of one request decoded by as many speculative rounds as it takes."""
    law = np.zeros((world.vocab,) * horizon)

    def play(prefix: Tokens, history: tuple[np.ndarray, ...], chance: float) -> None:
        if len(prefix) >= horizon:
            law[prefix[:horizon]] += chance
            return
        tree = decide.draft(world, prefix)
        for drafts, drafted in blocks(decide, tree):
            confidence = tree.confidence[drafts[:-1]][None]
            seen = (*history, confidence)
            older = seen[-1 - rule.delay] if len(seen) > rule.delay else None
            length = decide.verify_len(rule, confidence, older)[0]
            for tokens, emitted in emissions(decide, world, prefix, tree, drafts, length):
                play(prefix + tokens, seen, chance * drafted * emitted)

    play((), (), 1.0)
    return law
