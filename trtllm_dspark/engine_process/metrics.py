"""Counters, gauges and histograms of the engine process; one snapshot is what Triton's /metrics shows.

Written by the loop thread only (rejections: by the intake thread too, under the lock), read by the I/O thread.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence

from trtllm_dspark.serving.metric_schema import FAMILIES, Family, Kind, series_key

Snapshot = dict[str, dict[str, float]]


class _Histogram:
    """Cumulative buckets as Prometheus counts them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def series(self) -> tuple[dict[str, float], float, float]:
        """Return the buckets by `le`, the sum and the count."""
        total = 0
        buckets: dict[str, float] = {}
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets[series_key(le="+Inf" if bound == float("inf") else f"{bound:g}")] = float(total)
        return buckets, self._sum, float(total)


def _initial(family: Family) -> dict[str, float]:
    """Return the series that exist before anything happened."""
    if family.values:
        return {series_key(**{family.labels[0]: value}): 0.0 for value in family.values}
    return {"": 0.0} if family.kind is Kind.COUNTER and not family.labels else {}


class EngineMetrics:
    """All families of `serving.metric_schema`, by their short names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {
            family.name: _initial(family) for family in FAMILIES if family.kind is not Kind.HISTOGRAM
        }
        self._histograms = {f.name: _Histogram(f.buckets) for f in FAMILIES if f.kind is Kind.HISTOGRAM}

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        key = series_key(**labels)
        with self._lock:
            series = self._values[name]
            series[key] = series.get(key, 0.0) + value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._values[name][series_key(**labels)] = float(value)

    def add_positions(self, name: str, counts: Sequence[int]) -> None:
        """Increase a counter with label `position` (1-based) by a list of counts."""
        for position, count in enumerate(counts, start=1):
            if count:
                self.add(name, float(count), position=str(position))

    def observe(self, name: str, value: float) -> None:
        """Record one observation of a histogram."""
        self._histograms[name].observe(value)

    def snapshot(self) -> Snapshot:
        """Return every series as `{series name: {label key: value}}`; histograms as _bucket, _sum and _count."""
        with self._lock:
            out: Snapshot = {name: dict(series) for name, series in self._values.items()}
        for name, histogram in self._histograms.items():
            buckets, total, count = histogram.series()
            out[f"{name}_bucket"] = buckets
            out[f"{name}_sum"] = {"": total}
            out[f"{name}_count"] = {"": count}
        return out
