from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product

from trtllm_dspark.reference.schedule import early_stop, fixed, stale_topk, survivals, threshold, verify_budget

APPENDIX_A = {1: 1.0, 2: 0.5, 3: 0.45}.__getitem__
"""Steps a second of the paper's Appendix A."""


def random_case(rng: random.Random) -> tuple[list[list[Fraction]], Callable[[int], Fraction]]:
    num_requests, gamma = rng.randint(0, 5), rng.randint(1, 4)
    chances = [Fraction(n, 4) for n in (0, 1, 2, 3, 4, 4)]
    survival = [survivals([rng.choice(chances) for _ in range(gamma)]) for _ in range(num_requests)]
    times = [Fraction(10)]
    for _ in range(num_requests * (gamma + 1)):
        times.append(times[-1] + rng.choice([0, 0, 0, 1, 5]))  # a staircase
    return survival, lambda b: 1 / times[b]


def test_early_stop_appendix_a_admits_nothing() -> None:
    assert early_stop([[0.8, 0.8 * 0.9]], APPENDIX_A) == [0]
    assert early_stop([[0.8, 0.0]], APPENDIX_A) == [0]


def test_verify_budget_appendix_a_depends_on_the_first_token() -> None:
    assert verify_budget([[0.8, 0.8 * 0.9]], APPENDIX_A) == 2
    assert verify_budget([[0.8, 0.0]], APPENDIX_A) == 0


def test_early_stop_stops_at_the_first_step_that_does_not_gain() -> None:
    # 1 -> 1.9 / 2 is no gain although 2.7 / 2 would be one.
    assert early_stop([[0.9, 0.8]], lambda b: 1 / {1: 1, 2: 2, 3: 2}[b]) == [0]
    assert early_stop([[0.9, 0.8]], lambda b: 1 / {1: 1, 2: 1, 3: 2}[b]) == [1]


def test_early_stop_equal_throughput_is_no_gain() -> None:
    assert early_stop([[Fraction(1), Fraction(1)]], lambda b: Fraction(1, b)) == [0]


def test_early_stop_flat_cost_admits_all_but_impossible_ones() -> None:
    assert early_stop([[0.5, 0.0], [0.2, 0.1]], lambda _: 1.0) == [1, 2]


def test_early_stop_never_reads_the_token_it_admits() -> None:
    # Whatever stands behind position j must not change whether j is admitted, in any request.
    rng = random.Random(7)
    for _ in range(300):
        survival, cost = random_case(rng)
        before = early_stop(survival, cost)
        for r, row in enumerate(survival):
            for j in range(len(row) - 1):
                changed = [list(other) for other in survival]
                changed[r][j + 1 :] = survivals([row[j], *(Fraction(rng.randint(0, 4), 4) for _ in row[j + 1 :])])[1:]
                assert min(early_stop(changed, cost)[r], j + 1) == min(before[r], j + 1)


def test_stale_topk_takes_the_best_prefix_set_by_brute_force() -> None:
    rng = random.Random(5)
    for _ in range(200):
        survival, _ = random_case(rng)
        total = sum(1 for row in survival for a in row if a > 0)
        for budget in range(total + 2):
            lengths = stale_topk(survival, budget)
            assert sum(lengths) == min(budget, total)
            gain = sum(sum(row[:n]) for row, n in zip(survival, lengths, strict=True))
            ranges = [range(sum(a > 0 for a in row) + 1) for row in survival]
            options = [o for o in product(*ranges) if sum(o) == min(budget, total)]
            assert gain == max(sum(sum(row[:n]) for row, n in zip(survival, o, strict=True)) for o in options)


def test_verify_budget_is_the_smallest_global_maximum_over_all_prefix_sets() -> None:
    rng = random.Random(6)
    for _ in range(200):
        survival, cost = random_case(rng)
        best: dict[int, Fraction] = {}
        for lengths in product(*(range(sum(a > 0 for a in row) + 1) for row in survival)):
            gain = len(survival) + sum(sum(row[:n]) for row, n in zip(survival, lengths, strict=True))
            total = sum(lengths)
            best[total] = max(best.get(total, Fraction(0)), gain * cost(len(survival) + total))
        budget = verify_budget(survival, cost)
        assert best[budget] == max(best.values())
        assert all(value < best[budget] for total, value in best.items() if total < budget)


def test_stale_topk_ties_go_to_the_lower_request_then_step() -> None:
    assert stale_topk([[0.5, 0.5], [0.5, 0.5]], 3) == [2, 1]


def test_threshold_is_on_the_running_product() -> None:
    assert threshold([[0.9, 0.45, 0.44], [0.2, 0.1, 0.0]], 0.45) == [2, 0]
    assert threshold([[0.5, 0.0]], 0.0) == [1]


def test_fixed_is_clamped_to_the_block() -> None:
    assert fixed([[0.1, 0.1], [0.9, 0.9]], 5) == [2, 2]
