"""Times of drafts that an engine's own measurement does not cover."""

from __future__ import annotations

import time
from collections.abc import Callable

from trtllm_dspark.speculation.cost_table import CostTable, DraftShape

REPEATS = 3


def with_draft_times(table: CostTable, draft: Callable[[int, int], object]) -> CostTable:
    """Return the table's target passes with the times of drafts, each the best of a few: the first pass allocates.

    Args:
        table: times of the target.
        draft: drafts for a number of requests with so many tokens cached; the engine is idle.
    """
    shapes = {DraftShape(shape.num_requests, shape.depth) for shape in table.verify_us}
    ordered = sorted(shapes, key=lambda shape: (shape.depth, shape.num_requests))
    return CostTable(table.verify_us, {shape: _best_us(draft, shape) for shape in ordered})


def _best_us(draft: Callable[[int, int], object], shape: DraftShape) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        draft(shape.num_requests, shape.depth)
        best = min(best, (time.perf_counter() - started) * 1e6)
    return best
