"""Survivals and schedules in integers.

Source: docs/core_numerics.md, section 8.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.reference.bits.float32 import F32

ONE = 2**31
Grid = list[list[int]]


def survival_grid(confidence: F32, caps: NDArray[np.int64] | None = None) -> Grid:
    """Return [R][gamma] survivals in Q0.31 of float32 confidences; positions at or beyond a request's cap get 0."""
    clean = np.clip(np.nan_to_num(confidence, nan=0.0, posinf=1.0, neginf=0.0), 0, 1).astype(np.float32)
    rows: Grid = []
    for r, chances in enumerate(clean):
        limit = len(chances) if caps is None else int(caps[r])
        product, row = np.float32(1), []
        for k, chance in enumerate(chances):
            product = chance if k == 0 else product * chance
            row.append(int(np.rint(np.float64(product) * ONE)) if k < limit else 0)
        rows.append(row)
    return rows


def order(survival: Grid) -> list[tuple[int, int]]:
    """Return the candidates (request, step) with positive survival, largest first, ties by request then step."""
    pairs = [(-a, r, k) for r, row in enumerate(survival) for k, a in enumerate(row) if a > 0]
    return [(r, k) for _, r, k in sorted(pairs)]


def throughputs(
    survival: Grid, step_time_us: F32, *, load_scale: float = 1.0, extra_tokens: int = 0, fixed_time_us: float = 0.0
) -> list[float]:
    """Return Theta(n) for n = 0.. admitted candidates, in binary64."""
    base_tokens = len(survival) + extra_tokens
    base_time = float(step_time_us[base_tokens])
    expected, result = len(survival) * ONE, []
    for n, (r, k) in enumerate([(-1, -1), *order(survival)]):
        expected += survival[r][k] if n else 0
        time = fixed_time_us + (base_time + load_scale * (float(step_time_us[base_tokens + n]) - base_time))
        result.append(float(expected) / time if time else math.inf)
    return result


def _count(survival: Grid, admitted: list[tuple[int, int]], token_budget: int | None) -> list[int]:
    lengths = [0] * len(survival)
    for r, _ in admitted if token_budget is None else admitted[:token_budget]:
        lengths[r] += 1
    return lengths


def fixed(draft_len: int, caps: list[int], token_budget: int | None = None) -> list[int]:
    """Return min(draft_len, cap) of each request, cut by the budget in (step, request) order."""
    return _cut([min(draft_len, cap) for cap in caps], token_budget)


def threshold(survival: Grid, minimum: float, token_budget: int | None = None) -> list[int]:
    """Return the longest prefixes whose survivals are positive and reach `minimum`, cut by the budget."""
    floor = int(np.rint(np.float64(minimum) * ONE))
    lengths = []
    for row in survival:
        failing = (k for k, a in enumerate(row) if a == 0 or a < floor)
        lengths.append(next(failing, len(row)))
    return _cut(lengths, token_budget)


def _cut(lengths: list[int], token_budget: int | None) -> list[int]:
    if token_budget is None:
        return lengths
    steps = sorted((k, r) for r, length in enumerate(lengths) for k in range(length))
    kept = [0] * len(lengths)
    for _, r in steps[:token_budget]:
        kept[r] += 1
    return kept


def early_stop(survival: Grid, theta: list[float], token_budget: int | None = None) -> list[int]:
    """Return verify lengths of Algorithm 1, given Theta(n) of `throughputs`."""
    best, admitted = theta[0], 0
    for value in theta[1:]:
        if not value > best:
            break
        best, admitted = value, admitted + 1
    return _count(survival, order(survival)[:admitted], token_budget)


def verify_budget(theta: list[float], token_budget: int | None = None) -> int:
    """Return the smallest n, at most `token_budget`, that maximises Theta(n)."""
    considered = theta if token_budget is None else theta[: token_budget + 1]
    return considered.index(max(considered))


def stale_topk(survival: Grid, budget: int, token_budget: int | None = None) -> list[int]:
    """Return verify lengths of the first `budget` candidates."""
    return _count(survival, order(survival)[:budget], token_budget)
