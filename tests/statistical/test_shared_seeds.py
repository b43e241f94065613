"""Two requests of a batch with one seed: schedules that compare requests lose the law, request-local ones keep it.

Equal seeds at equal positions draw equal noise. A survival of the mate at step k then knows the draft tokens of this
request before k, and `early_stop` and `stale_topk` may rank it before an earlier step of this request. Where a token
budget is shared, a mate that has ended says as much: it freed the room because of the token this request is about to
draft. The runtime must give the requests of a batch different keys in rejection mode.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.decisions import CoreDecisions, ReferenceDecisions
from helpers.enumeration import Decisions, Rule, World, continued, emissions, target_law

from trtllm_dspark import _core

STEP = (0.0, 10.0, 15.0, 16.0, 17.0, 21.0, 22.0, 23.0)
PAIR = (World(1), World(101))
COMPARING = {
    "early_stop": Rule("early_stop", step_time_us=STEP),
    "stale_topk": Rule("stale_topk", budget=2),
}
LOCAL = {"fixed": Rule("fixed", draft_len=2), "threshold": Rule("threshold", threshold=0.35)}


@pytest.fixture(params=["reference", "core"])
def decide(request: pytest.FixtureRequest) -> Decisions:
    return ReferenceDecisions() if request.param == "reference" else CoreDecisions()


def joint_draws(first: np.ndarray, second: np.ndarray) -> list[tuple[int, int, float]]:
    """Return every pair of tokens that one uniform number draws from two laws, with its probability."""
    sums = [np.minimum(np.cumsum(law), 1.0) for law in (first, second)]
    edges = np.unique(np.concatenate([[0.0], *sums]))
    draws = []
    for low, high in zip(edges, edges[1:], strict=False):
        middle = (low + high) / 2
        tokens = [min(int(np.searchsorted(s, middle, side="right")), len(s) - 1) for s in sums]
        draws.append((tokens[0], tokens[1], float(high - low)))
    return draws


def bias_of_the_first(decide: Decisions, rule: Rule) -> float:
    """Largest error of the first request's law of three tokens when its mate drafts with the same uniforms."""
    world = PAIR[0]
    own, mate = (decide.draft(each, ()) for each in PAIR)
    law = np.zeros((3, 3, 3))
    for a1, b1, first in joint_draws(decide.law(own.laws[()]), decide.law(mate.laws[()])):
        for a2, _, second in joint_draws(decide.law(own.laws[(a1,)]), decide.law(mate.laws[(b1,)])):
            confidence = np.array([own.confidence[(a1,)], mate.confidence[(b1,)]])
            length = decide.verify_len(rule, confidence, None)[0]
            for tokens, chance in emissions(decide, world, (), own, (a1, a2), length):
                continued(decide, world, tokens, 3, first * second * chance, law)
    return float(np.abs(law - target_law(decide, world, 3)).max())


@pytest.mark.parametrize("rule", COMPARING.values(), ids=COMPARING)
def test_shared_seed_biases_schedules_that_compare_requests(decide: Decisions, rule: Rule) -> None:
    assert bias_of_the_first(decide, rule) > 0.05


@pytest.mark.parametrize("rule", LOCAL.values(), ids=LOCAL)
def test_shared_seed_leaves_request_local_schedules_alone(decide: Decisions, rule: Rule) -> None:
    assert bias_of_the_first(decide, rule) < 1e-12


def share_of_the_end_token(own_seeds: np.ndarray, mate_seeds: np.ndarray, target: np.ndarray) -> float:
    """Return how often a request emits token 1, the end, one round after its mate stood at the same position.

    The round has room for one draft token, which `fixed` gives to the mate while it is there.
    """
    count = len(own_seeds)
    heads = _core.DraftHeads(vocab_size=2, draft_vocab_size=2, kind="none")
    anchors, positions = np.zeros(count, np.int64), np.full(count, 9)
    room = [
        _core.schedule_prefixes("fixed", num_requests=n, max_draft_len=1, draft_len=1, token_budget=1) for n in (1, 2)
    ]
    assert [schedule.verify_len.tolist() for schedule in room] == [[1], [1, 0]]

    def emitted(seeds: np.ndarray, verify_len: np.ndarray) -> np.ndarray:
        sampling = _core.Sampling(np.ones(count, np.float32), seeds)
        draft = _core.draft_chain(heads, np.zeros((count, 1, 2), np.float32), anchors, positions, sampling)
        rows = np.tile(np.log(target).astype(np.float32), (count + int(verify_len.sum()), 1))
        return np.asarray(_core.accept_ragged(rows, verify_len, positions, sampling, draft=draft).tokens[:, 0])

    mate = emitted(mate_seeds, np.ones(count, np.int64))
    return float((emitted(own_seeds, (mate == 1).astype(np.int64)) == 1).mean())


def test_shared_seed_biases_any_schedule_under_a_shared_token_budget() -> None:
    target, seeds = np.array([0.7, 0.3]), np.arange(20_000, dtype=np.uint64)
    # The mate ends with probability 0.3, and then so does this request; otherwise its token comes from other noise.
    assert share_of_the_end_token(seeds, seeds, target) == pytest.approx(0.3 + 0.7 * 0.3, abs=0.017)
    # Five standard deviations of 20,000 draws.
    assert share_of_the_end_token(seeds, seeds + np.uint64(1 << 40), target) == pytest.approx(0.3, abs=0.017)
