"""What a pass costs: measured times by the shapes that really execute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import FloatArray
from trtllm_dspark.errors import ConfigError

FLAT_RATIO = 1.02
"""A table whose largest pass costs less than this times its smallest says nothing."""
INVERTED_RATIO = 0.9
"""More tokens at less than this share of the cost are no noise."""
Reals = NDArray[np.float64]
Number = TypeVar("Number", Reals, np.float64)


class VerifyShape(NamedTuple):
    """Shape of a target pass: R requests, T tokens, tokens of the longest row, tokens cached before each row."""

    num_requests: int
    num_tokens: int
    longest_row: int
    depth: int


class DraftShape(NamedTuple):
    """Shape of a draft: R requests, tokens of context of each."""

    num_requests: int
    depth: int


@dataclass(frozen=True)
class CostTable:
    """Times of verify and draft passes.

    Tokens of a round spread over its rows in many ways, and a padded pass costs by its longest row too. Two ways are
    measured: all rows equal, and one row grown to a whole block before the next one. A round lies between them; the
    curve that schedules read is their mean.

    Attributes:
        verify_us: microseconds of a target pass by shape.
        draft_us: microseconds of absorbing one token a request, a drafter block, the chain and the confidences.
        token_sizes: ascending sizes that passes are padded to, where the engine pads them: then times are a staircase,
            and a pass costs what the next size does. Empty = passes run as they are.
    """

    verify_us: Mapping[VerifyShape, float]
    draft_us: Mapping[DraftShape, float]
    token_sizes: tuple[int, ...] = ()

    def step_time_us(self, num_requests: int, max_tokens: int, *, depth: int = 0) -> FloatArray:
        """Return [max_tokens + 1] float32 microseconds of a pass over B tokens; entry 0 is unused.

        The nearest measured number of requests not below `num_requests` counts (else the largest). Between measured
        tokens and depths times are interpolated, beyond the last they go on at the last slope. Never falling.

        Args:
            num_requests: R.
            max_tokens: largest B.
            depth: tokens cached before each row, on average.

        Raises:
            ConfigError: the table is empty.
        """
        row = _row(self._measured, num_requests)
        if row is None:
            raise ConfigError("the cost table has no verify times; measure the engine again")
        lower, upper, share = _around(list(self._measured[row]), depth)
        low = self._curve(row, lower, max_tokens)
        high = low if upper == lower else self._curve(row, upper, max_tokens)
        curve: FloatArray = np.maximum.accumulate(_between(low, high, share)).astype(np.float32)
        if not self.token_sizes:
            return curve
        sizes = np.array([size for size in self.token_sizes if size <= max_tokens] + [max_tokens], np.int64)
        return np.asarray(curve[sizes[np.searchsorted(sizes, np.arange(max_tokens + 1))]], np.float32)

    def draft_time_us(self, num_requests: int, *, depth: int = 0) -> float:
        """Return microseconds of drafting one block for each of `num_requests` requests.

        Raises:
            ConfigError: the table has no draft times: it was measured on an engine without a drafter.
        """
        row = _row(self._draft_points, num_requests)
        if row is None:
            raise ConfigError("the cost table has no draft times; measure an engine that has a drafter")
        points = self._draft_points[row]
        lower, upper, share = _around(list(points), depth)
        return float(_between(np.float64(points[lower]), np.float64(points[upper]), share))

    @cached_property
    def _measured(self) -> dict[int, dict[int, list[Reals]]]:
        """By number of requests and depth, ascending: [N, 2] tokens and microseconds of even and of grown rows."""
        groups: dict[int, dict[int, list[VerifyShape]]] = {}
        for shape in sorted(self.verify_us):
            groups.setdefault(shape.num_requests, {}).setdefault(shape.depth, []).append(shape)
        return {row: {depth: self._ways(group[depth]) for depth in sorted(group)} for row, group in groups.items()}

    @cached_property
    def _draft_points(self) -> dict[int, dict[int, float]]:
        """By number of requests and depth, ascending: microseconds of a draft."""
        points: dict[int, dict[int, float]] = {}
        for shape in sorted(self.draft_us):
            points.setdefault(shape.num_requests, {})[shape.depth] = self.draft_us[shape]
        return points

    def _ways(self, shapes: list[VerifyShape]) -> list[Reals]:
        width = max(shape.longest_row for shape in shapes)
        ways = [[s for s in shapes if is_even(s)], [s for s in shapes if is_grown(s, width)]]
        times = [sorted((shape.num_tokens, self.verify_us[shape]) for shape in way) for way in ways if way]
        return [np.array(points, np.float64) for points in times]

    def _curve(self, num_requests: int, depth: int, max_tokens: int) -> Reals:
        """Return [max_tokens + 1] microseconds at a measured number of requests and depth."""
        tokens = np.arange(max_tokens + 1)
        curves = np.stack([_extended(points, tokens) for points in self._measured[num_requests][depth]])
        return np.asarray(curves.mean(axis=0), np.float64)


def is_even(shape: VerifyShape) -> bool:
    """Tell whether all rows of a shape are equally long, as near as the tokens allow."""
    return shape.longest_row == -(-shape.num_tokens // shape.num_requests)


def is_grown(shape: VerifyShape, width: int) -> bool:
    """Tell whether tokens fill one row up to `width` before the next."""
    return shape.longest_row == min(width, shape.num_tokens - shape.num_requests + 1)


def check_cost_table(table: CostTable) -> None:
    """Refuse times that must not decide anything.

    Raises:
        ConfigError: more tokens take clearly less time, or the largest pass takes no more than the smallest.
    """
    verify = table.verify_us
    for chain in _chains(verify):
        first, last = verify[chain[0]], verify[chain[-1]]
        if last < first * INVERTED_RATIO:
            raise ConfigError(
                f"the measured cost is inverted: {chain[-1].num_tokens} tokens of {chain[0].num_requests} requests "
                f"took {last:.0f} us, {chain[0].num_tokens} took {first:.0f} us; "
                "measure again while the machine is idle"
            )
    shallow = [shape for shape in verify if shape.depth == min(other.depth for other in verify)]
    low, high = (pick(shallow, key=lambda s: (s.num_tokens, s.num_requests)) for pick in (min, max))
    if low != high and verify[high] < verify[low] * FLAT_RATIO:
        raise ConfigError(
            f"the measured cost is flat: {high.num_tokens} tokens took {verify[high]:.0f} us, "
            f"{low.num_tokens} took {verify[low]:.0f} us; measure again while the machine is idle"
        )


def make_monotone(table: CostTable) -> CostTable:
    """Return the table with times that never fall as tokens are added (drafts: requests), nearest in least squares."""
    verify = dict(table.verify_us)
    # A shape in two chains is fitted in each in turn; the curve that schedules read is made monotone once more.
    for chain in _chains(verify):
        verify.update(zip(chain, isotonic([verify[shape] for shape in chain]), strict=True))
    draft = dict(table.draft_us)
    for depth in {shape.depth for shape in draft}:
        row = sorted(shape for shape in draft if shape.depth == depth)
        draft.update(zip(row, isotonic([draft[shape] for shape in row]), strict=True))
    return replace(table, verify_us=verify, draft_us=draft)


def isotonic(values: list[float]) -> list[float]:
    """Return the never falling sequence nearest to `values` in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, size = blocks.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def _chains(shapes: Iterable[VerifyShape]) -> list[list[VerifyShape]]:
    """Return shapes in the order in which each costs at least what the one before it does: more tokens, same R."""
    groups: dict[tuple[int, int], list[VerifyShape]] = {}
    for shape in shapes:
        groups.setdefault((shape.num_requests, shape.depth), []).append(shape)
    chains = []
    for group in groups.values():
        width = max(shape.longest_row for shape in group)
        chains.append(sorted(shape for shape in group if is_even(shape)))
        grown = sorted(shape for shape in group if is_grown(shape, width))
        if len(grown) > 1:
            chains.append(grown)
    return chains


def _extended(known: Reals, tokens: NDArray[np.int64]) -> Reals:
    """Interpolate [N, 2] tokens and microseconds over tokens, and go on at their last slope."""
    curve = np.interp(tokens, known[:, 0], known[:, 1])
    if len(known) > 1:
        slope = max(0.0, (known[-1, 1] - known[-2, 1]) / (known[-1, 0] - known[-2, 0]))
        curve = np.where(tokens > known[-1, 0], known[-1, 1] + slope * (tokens - known[-1, 0]), curve)
    return curve


def _row(measured: Iterable[int], num_requests: int) -> int | None:
    """Return the nearest of ascending numbers of requests that is not below `num_requests`, else the largest."""
    largest = None
    for largest in measured:
        if largest >= num_requests:
            break
    return largest


def _around(depths: list[int], depth: int) -> tuple[int, int, float]:
    """Return the ascending depths around one and its place between them: 0 up to the first, above 1 beyond the last."""
    if len(depths) == 1 or depth <= depths[0]:
        return depths[0], depths[0], 0.0
    index = next((index for index, measured in enumerate(depths) if measured >= depth), len(depths) - 1)
    lower, upper = depths[index - 1], depths[index]
    return lower, upper, (depth - lower) / (upper - lower)


def _between(lower: Number, upper: Number, share: float) -> Number:
    """Interpolate between two depths, or go on at their slope."""
    rise = upper - lower
    # A pass does not get cheaper with more context: a fall is noise, and must not be carried on.
    return lower + share * (np.maximum(rise, 0) if share > 1 else rise)
