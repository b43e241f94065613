"""What a simulated engine's passes take: the times of a `CostTable`, looked up thousands of times a second."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trtllm_dspark.engine.base import FloatArray
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import is_even, is_grown


class _Segment(NamedTuple):
    """Times by tokens between two measured depths: those of the lower, and what the upper adds."""

    low: FloatArray
    rise: FloatArray


@dataclass(frozen=True)
class LookupTable(CostTable):
    """A cost table that keeps its curves: equal answers, a hundred times as fast for a table of thousands of shapes."""

    _kept: dict[tuple[int, int], FloatArray] = field(default_factory=dict, repr=False, compare=False)
    # By number of requests and index of the measured depth below; several numbers of requests share a segment.
    _segments: dict[tuple[int, int], _Segment] = field(default_factory=dict, repr=False, compare=False)
    _drafts: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)
    _places: dict[int, tuple[int, float]] = field(default_factory=dict, repr=False, compare=False)
    _depths: list[int] = field(default_factory=list, repr=False, compare=False)
    _rows: list[int] = field(default_factory=list, repr=False, compare=False)

    @staticmethod
    def of(table: CostTable) -> LookupTable:
        """Return the same times."""
        depths = sorted({shape.depth for shape in table.verify_us} | {shape.depth for shape in table.draft_us})
        rows = sorted({shape.num_requests for shape in table.verify_us})
        return LookupTable(table.verify_us, table.draft_us, table.token_sizes, _depths=depths, _rows=rows)

    def step_time_us(self, num_requests: int, max_tokens: int, *, depth: int = 0) -> FloatArray:
        """See `CostTable`."""
        index, share = self._places.get(depth) or self._place(depth)
        segment = self._segments.get((num_requests, index))
        if segment is None or len(segment.low) <= max_tokens:
            segment = self._segment(num_requests, index, max_tokens)
        low = segment.low[: max_tokens + 1]
        if not share:
            return low.copy()
        rise = segment.rise[: max_tokens + 1]
        if share <= 1:
            # Between two curves that never fall.
            return low + np.float32(share) * rise
        return np.maximum.accumulate(low + np.float32(share) * np.maximum(rise, 0))

    def draft_time_us(self, num_requests: int, *, depth: int = 0) -> float:
        """See `CostTable`."""
        index, share = self._places.get(depth) or self._place(depth)
        low, rise = self._drafts.get((num_requests, index)) or self._draft(num_requests, index)
        return low + share * (max(0.0, rise) if share > 1 else rise)

    def _place(self, depth: int) -> tuple[int, float]:
        """Return which measured depth lies below one, and its place from there to the next, as `CostTable` does."""
        depths, index, share = self._depths, 0, 0.0
        if len(depths) > 1 and depth > depths[0]:
            index = min(bisect.bisect_left(depths, depth), len(depths) - 1) - 1
            share = (depth - depths[index]) / (depths[index + 1] - depths[index])
        self._places[depth] = index, share
        return index, share

    def _segment(self, num_requests: int, index: int, max_tokens: int) -> _Segment:
        # As in `CostTable`: the nearest measured number of requests not below counts, else the largest.
        row = self._rows[min(bisect.bisect_left(self._rows, num_requests), len(self._rows) - 1)]
        low, high = (self._kept_curve(row, depth, max_tokens) for depth in self._around(index))
        length = min(len(low), len(high))
        segment = self._segments.get((row, index))
        if segment is None or len(segment.low) < length:
            segment = _Segment(low[:length], high[:length] - low[:length])
        self._segments[row, index] = self._segments[num_requests, index] = segment
        return segment

    def _draft(self, num_requests: int, index: int) -> tuple[float, float]:
        low, high = (super(LookupTable, self).draft_time_us(num_requests, depth=at) for at in self._around(index))
        self._drafts[num_requests, index] = low, high - low
        return low, high - low

    def _around(self, index: int) -> list[int]:
        """Return the measured depths on both sides; beyond the last there is none."""
        return [self._depths[index], self._depths[min(index + 1, len(self._depths) - 1)]]

    def _kept_curve(self, num_requests: int, depth: int, max_tokens: int) -> FloatArray:
        curve = self._kept.get((num_requests, depth))
        if curve is None or len(curve) <= max_tokens:
            curve = super().step_time_us(num_requests, max(max_tokens, 4096), depth=depth)
            self._kept[num_requests, depth] = curve
            # Segments are made of the curves that are kept.
            self._segments.clear()
        return curve


class EngineTimes:
    """Look up one time after the other; between depths `DEPTH_STEP` apart times are interpolated.

    What a simulated pass takes is what a scheduler that reads the same table expects, but for one thing: where the
    table tells passes of equal rows from such of one long row after the other, a pass lies between them by its longest
    row.

    Args:
        table: measured or estimated times.
        max_tokens: tokens of a pass at most.
        by_row: whether such a difference counts.
    """

    DEPTH_STEP = 128

    def __init__(self, table: CostTable, *, max_tokens: int, by_row: bool = False) -> None:
        self._table = table
        self._width = max(shape.longest_row for shape in table.verify_us)
        self._even, self._grown = table, table
        even = {shape: us for shape, us in table.verify_us.items() if is_even(shape)}
        grown = {shape: us for shape, us in table.verify_us.items() if is_grown(shape, self._width)}
        self.by_row = by_row and any(shape not in even for shape in grown)
        if self.by_row:
            self._even, self._grown = (
                LookupTable.of(CostTable(part, table.draft_us, table.token_sizes)) for part in (even, grown)
            )
        self._max_tokens = max_tokens
        # By number of requests and step; pairs are of the depths on both sides.
        self._curves: dict[tuple[int, int], FloatArray] = {}
        self._verify: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        self._by_row: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        self._draft: dict[tuple[int, int], tuple[float, float]] = {}
        self._widest = max(shape.num_requests for shape in table.verify_us)

    def verify_us(self, num_requests: int, num_tokens: int, depth: float, longest_row: int = 0) -> float:
        """Return microseconds of a target pass over `num_tokens` tokens with `depth` tokens cached before each row.

        Args:
            num_requests: R.
            num_tokens: T.
            depth: tokens cached before each row, on average.
            longest_row: tokens of the longest row; 0 = not known.
        """
        if self.by_row and longest_row and num_tokens > num_requests:
            return self._verify_by_row(num_requests, num_tokens, depth, longest_row)
        step = int(depth) // self.DEPTH_STEP
        share = depth / self.DEPTH_STEP - step
        curves = self._verify.get((num_requests, step)) or self._verify_curves(num_requests, step)
        low = curves[0].item(num_tokens)
        return low + share * (curves[1].item(num_tokens) - low) if share else low

    def _verify_by_row(self, num_requests: int, num_tokens: int, depth: float, longest_row: int) -> float:
        step = int(depth) // self.DEPTH_STEP
        share = depth / self.DEPTH_STEP - step
        shortest = -(-num_tokens // num_requests)
        most = min(self._width, num_tokens - num_requests + 1)
        place = min(1.0, (longest_row - shortest) / (most - shortest)) if most > shortest else 0.0
        low, high = (self._row_times(num_requests, at, num_tokens, place) for at in (step, step + 1))
        return low + share * (high - low)

    def _row_times(self, num_requests: int, step: int, num_tokens: int, place: float) -> float:
        curves = self._by_row.get((num_requests, step))
        if curves is None:
            even, grown = (
                table.step_time_us(num_requests, self._max_tokens, depth=step * self.DEPTH_STEP)
                for table in (self._even, self._grown)
            )
            curves = self._by_row[num_requests, step] = even, grown
        low = curves[0].item(num_tokens)
        return low + place * (curves[1].item(num_tokens) - low)

    def draft_us(self, num_requests: int, depth: float) -> float:
        """Return microseconds of absorbing the committed tokens and drafting a block for each request."""
        step = int(depth) // self.DEPTH_STEP
        share = depth / self.DEPTH_STEP - step
        low, high = self._draft.get((num_requests, step)) or self._draft_points(num_requests, step)
        return low + share * (high - low) if share else low

    def prefill_us(self, num_tokens: int, depth: float) -> float:
        """Return microseconds of a pass over prompt chunks; the table's rows of most requests reach the most tokens."""
        return self.verify_us(min(self._widest, num_tokens), num_tokens, depth)

    def _verify_curves(self, num_requests: int, step: int) -> tuple[FloatArray, FloatArray]:
        pair = self._curve(num_requests, step), self._curve(num_requests, step + 1)
        self._verify[num_requests, step] = pair
        return pair

    def _curve(self, num_requests: int, step: int) -> FloatArray:
        curve = self._curves.get((num_requests, step))
        if curve is None:
            curve = self._table.step_time_us(num_requests, self._max_tokens, depth=step * self.DEPTH_STEP)
            self._curves[num_requests, step] = curve
        return curve

    def _draft_points(self, num_requests: int, step: int) -> tuple[float, float]:
        low, high = (self._table.draft_time_us(num_requests, depth=at * self.DEPTH_STEP) for at in (step, step + 1))
        self._draft[num_requests, step] = low, high
        return low, high
