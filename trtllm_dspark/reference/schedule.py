"""How many draft tokens of each request to verify, written as in the paper; exact for exact numbers.

Every function takes any numbers (floats, integers, fractions), so that a proof can run Algorithm 1 without rounding.
Survival a[r][k] is the probability that the first k + 1 draft tokens of request r are all accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from operator import mul

Number = float | Fraction
Survivals = Sequence[Sequence[Number]]
StepsPerSecond = Callable[[int], Number]


def survivals(confidence: Sequence[Number]) -> list[Number]:
    """Return the running product of one request's conditional confidences."""
    return list(accumulate(confidence, mul))


def fixed(survival: Survivals, draft_len: int) -> list[int]:
    """Verify the same number of draft tokens of every request."""
    return [min(draft_len, len(row)) for row in survival]


def threshold(survival: Survivals, minimum: Number) -> list[int]:
    """Verify the longest prefix whose survivals are all positive and at least `minimum`."""
    lengths = []
    for row in survival:
        kept = 0
        while kept < len(row) and row[kept] > 0 and row[kept] >= minimum:
            kept += 1
        lengths.append(kept)
    return lengths


def candidates(survival: Survivals) -> list[tuple[int, int]]:
    """Return all (request, step) with positive survival: survival descending, then request, then step ascending.

    A request's own survivals never increase, so (r, j) always stands before (r, j + 1).
    """
    pairs = [(r, j) for r, row in enumerate(survival) for j, a in enumerate(row) if a > 0]
    return sorted(pairs, key=lambda pair: -survival[pair[0]][pair[1]])


def early_stop(survival: Survivals, steps_per_second: StepsPerSecond) -> list[int]:
    """Choose prefix lengths by Algorithm 1.

    Args:
        survival: [R][gamma].
        steps_per_second: SPS(B), target steps a second when B tokens are verified.

    Returns:
        ell_r of each request.

    Source: DSpark paper, Algorithm 1.
    """
    num_requests = len(survival)
    verify_len = [0] * num_requests
    num_tokens = num_requests
    expected: Number = num_requests
    best = expected * steps_per_second(num_tokens)
    for r, j in candidates(survival):
        num_tokens += 1
        expected += survival[r][j]
        throughput = expected * steps_per_second(num_tokens)
        if throughput <= best:
            # Looking further and coming back would let token j itself decide whether it is verified (Appendix A).
            break
        best = throughput
        verify_len[r] = j + 1
    return verify_len


def verify_budget(survival: Survivals, steps_per_second: StepsPerSecond) -> int:
    """Return the number of draft tokens with the highest throughput, by a global search; the smallest among equals.

    Lossless only when the survivals are older than the tokens about to be judged.

    Source: DSpark paper, section 5.2.
    """
    expected: Number = len(survival)
    throughputs = [expected * steps_per_second(len(survival))]
    for admitted, (r, j) in enumerate(candidates(survival), start=1):
        expected += survival[r][j]
        throughputs.append(expected * steps_per_second(len(survival) + admitted))
    return throughputs.index(max(throughputs))


def stale_topk(survival: Survivals, budget: int) -> list[int]:
    """Verify the `budget` candidates that survive most likely.

    Source: DSpark paper, section 5.2.
    """
    verify_len = [0] * len(survival)
    for r, _ in candidates(survival)[:budget]:
        verify_len[r] += 1
    return verify_len
