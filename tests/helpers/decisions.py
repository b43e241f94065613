"""The reference's and the core's decisions behind one interface, so that one proof runs on both."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np

from helpers.enumeration import Rule, Tokens, Tree, World
from trtllm_dspark import _core
from trtllm_dspark.reference import acceptance, chain, heads, sampling, schedule


class ReferenceDecisions:
    """`trtllm_dspark.reference`, float64."""

    def target(self, world: World, prefix: Tokens) -> np.ndarray:
        return sampling.token_law(world.target_logits(prefix), world.temperature, world.top_k, world.top_p)

    def draft(self, world: World, prefix: Tokens) -> Tree:
        key = ("reference", prefix)
        if key not in world.cache:
            world.cache[key] = self._draft(world, prefix)
        tree: Tree = world.cache[key]
        return tree

    def _draft(self, world: World, prefix: Tokens) -> Tree:
        weights = {name: value.astype(np.float64) for name, value in world.head_weights().items()}
        head = heads.Heads(world.kind, d2t=None if world.d2t is None else np.array(world.d2t), **weights)
        anchor, hidden = (prefix or (world.anchor,))[-1], world.hidden(prefix).astype(np.float64)
        laws: dict[Tokens, np.ndarray] = {}
        confidence: dict[Tokens, np.ndarray] = {}
        for forced in product(range(world.vocab), repeat=world.gamma):
            block = chain.draft_chain(
                head, world.base_logits(prefix).astype(np.float64), anchor, lambda _, step, f=forced: f[step],
                world.vocab, hidden=hidden, temperature=world.temperature, top_k=world.top_k, top_p=world.top_p,
                num_candidates=world.num_candidates,
            )  # fmt: skip
            for step in range(world.gamma):
                laws[forced[:step]] = block.laws[step]
            confidence[forced[:-1]] = heads.confidence(head, hidden, anchor, block.tokens)
        return Tree(laws, confidence)

    def law(self, row: np.ndarray) -> np.ndarray:
        return row

    def acceptance(self, target: np.ndarray, draft: np.ndarray, token: int) -> float:
        return acceptance.acceptance_probability(target, draft, token)

    def residual(self, target: np.ndarray, draft: np.ndarray) -> np.ndarray:
        return acceptance.residual_law(target, draft)

    def verify_len(self, rule: Rule, confidence: np.ndarray, older: np.ndarray | None) -> list[int]:
        survival = [schedule.survivals(row) for row in confidence.tolist()]

        def speed(tokens: int) -> float:
            return 1 / rule.step_time_us[tokens]

        if rule.mode == "fixed":
            return schedule.fixed(survival, rule.draft_len)
        if rule.mode == "threshold":
            return schedule.threshold(survival, rule.threshold)
        if rule.mode == "early_stop":
            return schedule.early_stop(survival, speed)
        if rule.mode == "fresh_search":
            return schedule.stale_topk(survival, schedule.verify_budget(survival, speed))
        budget = rule.budget
        if rule.delay:
            past = [] if older is None else [schedule.survivals(row) for row in older.tolist()]
            budget = schedule.verify_budget(past, speed) if past else confidence.size
        return schedule.stale_topk(survival, budget)


class CoreDecisions:
    """`trtllm_dspark._core`: its drafts, masses, picks, tests and schedules; randomness by bisection over the bits."""

    def target(self, world: World, prefix: Tokens) -> np.ndarray:
        key = ("core target", prefix)
        if key not in world.cache:
            logits = world.target_logits(prefix)
            world.cache[key] = _core.row_masses(logits, world.temperature, world.top_k, world.top_p)
        masses: np.ndarray = world.cache[key]
        return masses

    def draft(self, world: World, prefix: Tokens) -> Tree:
        key = ("core", prefix)
        if key not in world.cache:
            world.cache[key] = self._draft(world, prefix)
        tree: Tree = world.cache[key]
        return tree

    def _draft(self, world: World, prefix: Tokens) -> Tree:
        """Draft with ever more seeds until every block of positive probability was drawn."""
        head = core_heads(world)
        laws: dict[Tokens, np.ndarray] = {}
        confidence: dict[Tokens, np.ndarray] = {}
        for first_seed in range(0, 2**14, 256):
            seeds = np.arange(first_seed, first_seed + 256, dtype=np.uint64)
            draft, chances = core_draft(world, head, prefix, seeds)
            for r, row in enumerate(draft.tokens.tolist()):
                for step in range(world.gamma):
                    if tuple(row[:step]) not in laws:
                        laws[tuple(row[:step])] = draft.masses(r, step)
                known = confidence.setdefault(tuple(row[:-1]), chances[r])
                assert np.array_equal(known, chances[r]), "a confidence depends on the last draft token"
            reachable = [(*past, int(v)) for past, row in laws.items() for v in np.flatnonzero(row)]
            if all(block in laws for block in reachable if len(block) < world.gamma):
                return Tree(laws, confidence)
        raise AssertionError(f"some draft prefix of {world} never came up in 2^14 draws")

    def law(self, row: np.ndarray) -> np.ndarray:
        return shares(lambda bits: _core.pick(row, bits), len(row))

    def acceptance(self, target: np.ndarray, draft: np.ndarray, token: int) -> float:
        masses = int(target[token]), int(target.sum()), int(draft[token]), int(draft.sum())
        return first_true(lambda n: n == 2**53 or not _core.accept_test(n << 11, *masses), 2**53) / 2**53

    def residual(self, target: np.ndarray, draft: np.ndarray) -> np.ndarray:
        rest = _core.residual_masses(target, draft)
        return self.law(rest if rest.any() else target)

    def verify_len(self, rule: Rule, confidence: np.ndarray, older: np.ndarray | None) -> list[int]:
        confidence = np.ascontiguousarray(confidence, np.float32)
        times = np.array(rule.step_time_us, np.float32)
        mode, budget = rule.mode, rule.budget
        if mode == "fresh_search":
            mode, budget = "stale_topk", _core.verify_budget(confidence, step_time_us=times)[0]
        elif rule.delay:
            budget = confidence.size
            if older is not None:
                budget = _core.verify_budget(np.ascontiguousarray(older, np.float32), step_time_us=times)[0]
        chosen = _core.schedule_prefixes(
            mode, num_requests=len(confidence), max_draft_len=confidence.shape[1], confidence=confidence,
            **{
                "fixed": {"draft_len": rule.draft_len},
                "threshold": {"threshold": rule.threshold},
                "early_stop": {"step_time_us": times},
                "stale_topk": {"budget": budget},
            }[mode],
        )  # fmt: skip
        lengths: list[int] = chosen.verify_len.tolist()
        return lengths


def core_heads(world: World) -> _core.DraftHeads:
    return _core.DraftHeads(
        vocab_size=world.vocab, draft_vocab_size=world.draft_vocab, kind=world.kind,
        confidence_with_markov=world.kind != "none",
        d2t=None if world.d2t is None else np.array(world.d2t), **world.head_weights(),
    )  # fmt: skip


def core_draft(
    world: World, head: _core.DraftHeads, prefix: Tokens, seeds: np.ndarray, acceptance: str = "rejection"
) -> tuple[_core.Draft, np.ndarray]:
    """Return the core's draft of the block after `prefix` and its confidences, one request a seed."""
    size = len(seeds)
    anchors = np.full(size, (prefix or (world.anchor,))[-1])
    hidden = np.repeat(world.hidden(prefix)[None], size, axis=0)
    draft = _core.draft_chain(
        head, np.repeat(world.base_logits(prefix)[None], size, axis=0), anchors,
        np.full(size, world.position + len(prefix)), core_sampling(world, seeds), hidden=hidden,
        acceptance=acceptance, num_candidates=world.num_candidates,
    )  # fmt: skip
    return draft, _core.confidence(head, hidden, anchors, draft.tokens)


def core_sampling(world: World, seeds: np.ndarray) -> _core.Sampling:
    size = len(seeds)
    return _core.Sampling(
        np.full(size, world.temperature, np.float32), seeds,
        np.full(size, world.top_k), np.full(size, world.top_p, np.float32),
    )  # fmt: skip


def first_true(predicate: Callable[[int], bool], limit: int) -> int:
    """Return the smallest n in [0, limit] for which a monotone predicate holds; it must hold at `limit`."""
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if predicate(middle) else (middle + 1, high)
    return low


def shares(choose: Callable[[int], int], size: int) -> np.ndarray:
    """Return the share of all 64-bit numbers that selects each token of a choice that is monotone in the bits."""
    edges = [first_true(lambda bits, t=token: bits == 2**64 or choose(bits) >= t, 2**64) for token in range(size)]
    edges.append(2**64)
    return np.array([(high - low) / 2**64 for low, high in zip(edges, edges[1:], strict=False)])
