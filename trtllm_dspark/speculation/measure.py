"""Measure a cost table on an idle engine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import ContextBatch, Engine, EngineLimits, IntArray, TokenBatch
from trtllm_dspark.speculation.cost_table import CostTable, DraftShape, VerifyShape

DEPTHS = (128, 1024)
REPEATS = 5
Progress = Callable[[int, int], None]
_Shape = TypeVar("_Shape", VerifyShape, DraftShape)


@runtime_checkable
class PadsTokens(Protocol):
    """An engine that pads its passes, to the sizes it has captured or compiled."""

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """Ascending sizes of target passes."""
        ...


class PassTimer(Protocol):
    """What times the passes of an engine on its device, without what a host adds."""

    def verify_us(self, num_requests: int, num_tokens: int, depth: int) -> float:
        """Return the microseconds of a target pass."""
        ...

    def draft_us(self, num_requests: int, depth: int) -> float:
        """Return the microseconds of absorbing and drafting."""
        ...


@runtime_checkable
class TimesPasses(Protocol):
    """An engine that may time its passes itself."""

    @property
    def pass_timer(self) -> PassTimer | None:
        """Its timer, if it has one."""
        ...


def device_timer(engine: Engine) -> PassTimer | None:
    """Return what times the engine's rounds on its device; None where passes are timed on the host."""
    return engine.pass_timer if isinstance(engine, TimesPasses) else None


def measure_cost_table(
    engine: Engine, *, quick: bool = False, progress: Progress | None = None, max_draft_len: int | None = None
) -> CostTable:
    """Time the engine's passes while it is idle: medians of 5.

    All shapes are run once per repeat, so that a busy moment hits many shapes once and not one shape five times. Slots
    are overwritten, so no request may be active. Costs are those of greedy requests.

    An engine that times its passes on its device does so. Where it pads them the table says to what sizes, so that
    times between them are read as steps.

    Args:
        engine: target and drafter.
        quick: one context depth, fewer lengths.
        progress: called with finished and all passes.
        max_draft_len: drafts of a request that the table covers; None = the engine's block.
    """
    limits = engine.limits
    if max_draft_len is not None:
        limits = replace(limits, max_draft_len=max_draft_len)
    shapes: dict[int, list[VerifyShape]] = {}
    for depth in _depths(limits, quick=quick):
        shapes[depth] = [shape for count in _counts(limits) for shape in _shapes(limits, count, depth, quick=quick)]
    # What drafts token after token is timed by what drives it.
    blocks = limits.has_drafter and not limits.autoregressive
    drafts = _counts(limits) if blocks else []
    total = REPEATS * (sum(map(len, shapes.values())) + len(drafts) * len(shapes))
    verify: dict[VerifyShape, list[float]] = {shape: [] for row in shapes.values() for shape in row}
    draft: dict[DraftShape, list[float]] = {}
    done = filled = 0
    timer = device_timer(engine)
    for depth, row in shapes.items():
        if timer is None:
            _fill(engine, filled, depth)
            filled = depth
            # The first pass of a shape allocates; it does not count.
            _time_verify(engine, max(row, key=lambda shape: shape.num_tokens))
        for repeat in range(REPEATS):
            # In another order each time: a machine that is throttled after a burst would slow the last shapes always.
            for shape in random.Random(repeat).sample(row, len(row)):
                verify[shape].append(
                    _time_verify(engine, shape)
                    if timer is None
                    else timer.verify_us(shape.num_requests, shape.num_tokens, depth)
                )
            for count in drafts:
                draft.setdefault(DraftShape(count, depth), []).append(
                    _time_draft(engine, count, depth) if timer is None else timer.draft_us(count, depth)
                )
            done += len(row) + len(drafts)
            if progress is not None:
                progress(done, total)
    sizes = tuple(engine.token_sizes) if isinstance(engine, PadsTokens) else ()
    return CostTable(_medians(verify), _medians(draft), sizes)


def _medians(times: dict[_Shape, list[float]]) -> dict[_Shape, float]:
    return {shape: statistics.median(values) for shape, values in times.items()}


def _depths(limits: EngineLimits, *, quick: bool) -> list[int]:
    """Return the depths to measure, ascending: passes grow with them along a line, so two tell the rest."""
    deepest = max(0, limits.max_seq_len - limits.max_draft_len - 1)
    return sorted({min(deepest, depth) for depth in (DEPTHS[:1] if quick else DEPTHS)})


def _fill(engine: Engine, start: int, depth: int) -> None:
    """Give every slot `depth` cached tokens, of which it has `start`; the drafter's context too."""
    count = engine.limits.max_batch_size
    step = engine.limits.max_num_tokens // count
    for position in range(start, depth, step):
        lengths = np.full(count, min(step, depth - position), np.int64)
        batch = _batch(count, lengths, position)
        output = engine.verify(replace(batch, logit_rows=batch.logit_rows[-1:]))
        if engine.limits.has_drafter and not engine.limits.autoregressive:
            engine.absorb(ContextBatch(output.features, lengths, batch.write_indices))


def _counts(limits: EngineLimits) -> list[int]:
    powers = [2**power for power in range(13) if 2**power < limits.max_batch_size]
    return [*powers, limits.max_batch_size]


def _shapes(limits: EngineLimits, count: int, depth: int, *, quick: bool) -> list[VerifyShape]:
    """Return the shapes of one number of requests: all rows equal, and one row grown before the next."""
    width = limits.max_draft_len + 1
    lengths = {1, 2, 4, width} if quick else {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, width}
    even = {VerifyShape(count, count * length, length, depth) for length in lengths if length <= width}
    grown = {VerifyShape(count, count - 1 + length, length, depth) for length in lengths if length <= width}
    halves = {VerifyShape(count, count + (count // 2) * (width - 1), width, depth)} if count > 2 else set()
    if quick:
        grown = {shape for shape in grown if shape.longest_row in (1, width)}
    grown |= {VerifyShape(count, count * width, width, depth)}
    return sorted(shape for shape in even | grown | halves if shape.num_tokens <= limits.max_num_tokens)


def _row_lens(shape: VerifyShape) -> IntArray:
    """Return [R] int64 tokens a row: as many rows of the longest length as the tokens fill, the rest alike."""
    if shape.num_tokens == shape.num_requests * shape.longest_row:
        return np.full(shape.num_requests, shape.longest_row, np.int64)
    full = (shape.num_tokens - shape.num_requests) // max(1, shape.longest_row - 1)
    lengths = np.ones(shape.num_requests, np.int64)
    lengths[:full] = shape.longest_row
    return lengths


def _batch(count: int, lengths: IntArray, depth: int) -> TokenBatch:
    total = int(lengths.sum())
    return TokenBatch(
        token_ids=np.zeros(total, np.int64),
        row_lens=lengths,
        write_indices=np.full(count, depth, np.int64),
        logit_rows=np.arange(total, dtype=np.int64),
    )


def _time_verify(engine: Engine, shape: VerifyShape) -> float:
    batch = _batch(shape.num_requests, _row_lens(shape), shape.depth)
    start = time.perf_counter()
    engine.verify(batch)
    return (time.perf_counter() - start) * 1e6


def _time_draft(engine: Engine, count: int, depth: int) -> float:
    """Time what a round does before it verifies, at a drafter context of the target's length."""
    ones = np.ones(count, np.int64)
    features = engine.verify(_batch(count, ones, depth)).features
    anchors, before = np.zeros(count, np.int64), np.full(count, depth, np.int64)
    sampling = _core.Sampling(np.zeros(count, np.float32), np.arange(count, dtype=np.uint64))
    start = time.perf_counter()
    engine.absorb(ContextBatch(features, ones, before))
    block = engine.draft_block(anchors, before + 1)
    chain = _core.draft_chain(engine.heads, block.base_logits, anchors, before + 1, sampling, hidden=block.hidden)
    if engine.heads.has_confidence:
        _core.confidence(engine.heads, block.hidden, anchors, chain.tokens)
    return (time.perf_counter() - start) * 1e6
