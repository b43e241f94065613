"""Throughput against the speed a user sees: frontiers, and one figure read off where the other is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """One load of one policy: tokens a second and user, tokens a second of the server."""

    speed: float
    throughput: float


def frontier(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points that no other beats in both, the fastest for a user first."""
    best, kept = float("-inf"), []
    for index in sorted(range(len(points)), key=lambda i: (-points[i].speed, -points[i].throughput)):
        if points[index].throughput > best:
            best = points[index].throughput
            kept.append(index)
    return kept


def throughput_at(points: Sequence[Point], speed: float) -> float | None:
    """Return the most throughput at which users still see a speed; None where no load is that fast.

    Args:
        points: of one policy by rising load; between neighbours the curve is straight.
        speed: tokens a second and user.
    """
    best = [point.throughput for point in points if point.speed >= speed]
    for first, second in zip(points, points[1:], strict=False):
        if min(first.speed, second.speed) < speed < max(first.speed, second.speed):
            share = (speed - first.speed) / (second.speed - first.speed)
            best.append(first.throughput + share * (second.throughput - first.throughput))
    return max(best, default=None)


def speed_at(points: Sequence[Point], throughput: float) -> float | None:
    """Return the most speed a user sees at a throughput; None where no load reaches it."""
    best = []
    for first, second in zip(points, points[1:], strict=False):
        low, high = sorted((first.throughput, second.throughput))
        if low <= throughput <= high and high > low:
            share = (throughput - first.throughput) / (second.throughput - first.throughput)
            best.append(first.speed + share * (second.speed - first.speed))
    best += [point.speed for point in points if point.throughput == throughput]
    return max(best, default=None)
