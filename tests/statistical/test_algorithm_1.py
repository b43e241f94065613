"""The core's schedules against literal transcriptions in exact arithmetic, on thousands of random cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
from helpers.random_schedules import Case, random_cases

from trtllm_dspark import _core
from trtllm_dspark.reference import schedule
from trtllm_dspark.reference.bits import schedule as bits

NUM_CASES = 10_000


def exact_survivals(case: Case) -> list[list[Fraction]]:
    return [[Fraction(a, bits.ONE) for a in row] for row in bits.survival_grid(case.confidence, case.caps)]


def exact_speed(case: Case) -> Callable[[int], Fraction]:
    """SPS(B) as a rational, with load scale, other rows and fixed time as docs/core_numerics.md combines them."""
    num_requests = len(case.confidence)

    def speed(num_tokens: int) -> Fraction:
        base = float(case.step_time_us[num_requests + case.extra_tokens])
        marginal = float(case.step_time_us[num_tokens + case.extra_tokens]) - base
        return 1 / Fraction(case.fixed_time_us + (base + case.load_scale * marginal))

    return speed


def core_lengths(case: Case, mode: str, **options: object) -> list[int]:
    num_requests, gamma = case.confidence.shape
    chosen = _core.schedule_prefixes(
        mode, num_requests=num_requests, max_draft_len=gamma, confidence=case.confidence, caps=case.caps, **options
    )
    lengths: list[int] = chosen.verify_len.tolist()
    return lengths


def cut(lengths: list[int], survival: list[list[Fraction]], limit: int | None) -> list[int]:
    """Return lengths with only the first `limit` candidates of the admission order."""
    if limit is None:
        return lengths
    kept = [0] * len(lengths)
    admitted = [(r, j) for r, j in schedule.candidates(survival) if j < lengths[r]]
    for r, _ in admitted[:limit]:
        kept[r] += 1
    return kept


def test_early_stop_equals_algorithm_1_transcribed() -> None:
    seen: Counter[str] = Counter()
    for number, case in enumerate(random_cases(NUM_CASES, seed=1)):
        survival = exact_survivals(case)
        expected = cut(schedule.early_stop(survival, exact_speed(case)), survival, case.token_budget)
        assert core_lengths(case, "early_stop", **case.costs()) == expected, f"case {number}: {case}"
        candidates = len(schedule.candidates(survival))
        seen["none" if not sum(expected) else "all" if sum(expected) == candidates else "some"] += 1
    assert min(seen["none"], seen["some"], seen["all"]) > NUM_CASES // 20, f"one-sided cases: {seen}"


def test_verify_budget_equals_the_global_search() -> None:
    differs = 0
    for number, case in enumerate(random_cases(NUM_CASES // 4, seed=2)):
        survival, speed = exact_survivals(case), exact_speed(case)
        if case.token_budget is None:
            expected = schedule.verify_budget(survival, speed)
        else:
            limited = cut([len(row) for row in survival], survival, case.token_budget)
            expected = schedule.verify_budget([row[:n] for row, n in zip(survival, limited, strict=True)], speed)
        budget, _ = _core.verify_budget(case.confidence, caps=case.caps, **case.costs())
        assert budget == expected, f"case {number}: {case}"
        differs += budget != sum(schedule.early_stop(survival, speed))
    assert differs > NUM_CASES // 80, "no staircase tells the two apart"


def test_stale_topk_equals_brute_force() -> None:
    for number, case in enumerate(random_cases(NUM_CASES // 10, seed=3, max_requests=3, max_gamma=3)):
        survival = exact_survivals(case)
        for budget in range(case.confidence.size + 2):
            lengths = core_lengths(case, "stale_topk", budget=budget)
            assert lengths == brute_force(survival, budget), f"case {number}, budget {budget}: {case}"


def brute_force(survival: list[list[Fraction]], budget: int) -> list[int]:
    """Return the best prefix set of at most `budget` tokens with positive survival; ties: earlier requests get more.

    Best by largest sum, then most tokens, then lexicographically largest lengths among the sets of equal value.
    """
    ranges = [sum(a > 0 for a in row) for row in survival]
    options = [o for o in prefixes(ranges) if sum(o) <= budget]
    return list(max(options, key=lambda o: (value(survival, o), sum(o), o)))


def value(survival: list[list[Fraction]], lengths: tuple[int, ...]) -> Fraction:
    return sum((a for row, n in zip(survival, lengths, strict=True) for a in row[:n]), Fraction(0))


def prefixes(ranges: list[int]) -> Iterator[tuple[int, ...]]:
    if not ranges:
        yield ()
        return
    for tail in prefixes(ranges[1:]):
        for length in range(ranges[0] + 1):
            yield (length, *tail)


def test_threshold_equals_the_running_product_rule() -> None:
    for number, case in enumerate(random_cases(NUM_CASES // 10, seed=4)):
        survival = exact_survivals(case)
        for minimum in (0.0, 0.25, 0.3, 1.0):
            floor = Fraction(round(minimum * bits.ONE), bits.ONE)
            lengths = core_lengths(case, "threshold", threshold=minimum)
            assert lengths == schedule.threshold(survival, floor), f"case {number}, {minimum}: {case}"


def test_schedules_never_read_the_token_they_admit() -> None:
    """Change every confidence behind one position: whether that position is verified must not change."""
    rng = np.random.default_rng(5)
    rules: dict[str, Callable[[Case], dict[str, object]]] = {
        "early_stop": Case.costs,
        "threshold": lambda case: {"threshold": 0.3, "token_budget": case.token_budget},
        "stale_topk": lambda case: {"budget": case.confidence.size // 2},
        "fixed": lambda case: {"draft_len": 1, "token_budget": case.token_budget},
    }
    changes = 0
    for number, case in enumerate(random_cases(400, seed=6)):
        for mode, options in rules.items():
            before = core_lengths(case, mode, **options(case))
            for r, j in np.ndindex(*case.confidence.shape):
                other = case.confidence.copy()
                other[r, j + 1 :] = rng.choice([0, 0.5, 1], other.shape[1] - j - 1)
                after = core_lengths(case.with_confidence(other), mode, **options(case))
                assert (before[r] > j) == (after[r] > j), f"{mode}, case {number}, request {r}, step {j}: {case}"
                changes += before != after
    assert changes > 1000, "the changed confidences changed nothing"


def test_schedule_odd_confidences_count_as_documented() -> None:
    confidence = np.array([[np.nan, 1.0], [2.0, -1.0], [1.0, 1.0]], np.float32)
    chosen = _core.schedule_prefixes("threshold", num_requests=3, max_draft_len=2, confidence=confidence, threshold=0.5)
    assert chosen.verify_len.tolist() == [0, 1, 2]
    assert set(chosen.warnings) == {"nan_confidence", "confidence_out_of_range"}
