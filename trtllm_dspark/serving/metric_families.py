"""Publish the engine's metrics through Triton's MetricFamily: one thread of one stub makes every metric call.

A metric call blocks for ever when tritonserver is killed; the stub's parent watchdog ends the process then.
"""

from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_dspark.serving.client import EngineClient
from trtllm_dspark.serving.framing import Message
from trtllm_dspark.serving.metric_schema import FAMILIES, Kind, parse_series_key

_PERIOD_S = 0.5


class MetricPublisher:
    """Copy snapshots of the engine process into metric families.

    Counters are published as increments, so they stay monotonic when the engine process restarts from zero.
    """

    def __init__(self, model: str, version: str) -> None:
        self._labels = {"model": model, "version": version}
        self._families: dict[str, tuple[Any, bool]] = {}
        self._metrics: dict[tuple[str, str], Any] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._arrived = threading.Condition()
        self._snapshot: Message | None = None
        self._epoch: float | None = None
        self._num_restarts = 0
        for family in FAMILIES:
            if family.kind is Kind.HISTOGRAM:
                for suffix in ("_bucket", "_sum", "_count"):
                    self._add_family(family.name + suffix, family.help, counter=True)
            else:
                self._add_family(family.name, family.help, counter=family.kind is Kind.COUNTER)

    def receive(self, message: Message) -> None:
        """Keep the newest snapshot (called on the client's reader thread)."""
        if message.get("type") == "metrics":
            with self._arrived:
                self._snapshot = message
                self._arrived.notify()

    def run(self, client: EngineClient, stopping: threading.Event) -> None:
        """Ask for a snapshot and publish it, again and again until told to stop."""
        self._increment("dspark_engine_restarts", "", 0.0)
        while not stopping.wait(_PERIOD_S):
            connected = client.connected and client.post({"type": "metrics"})
            self._restarts(client.num_engines - 1)
            self._set("dspark_engine_up", "", 1.0 if connected else 0.0, counter=False)
            with self._arrived:
                if connected and self._snapshot is None:
                    self._arrived.wait(_PERIOD_S)
                snapshot, self._snapshot = self._snapshot, None
            if snapshot is not None:
                self._publish(snapshot)
            elif not connected:
                for name in ("dspark_requests_waiting", "dspark_requests_running"):
                    self._set(name, "", 0.0, counter=False)

    def _restarts(self, count: int) -> None:
        if count > self._num_restarts:
            self._increment("dspark_engine_restarts", "", float(count - self._num_restarts))
            self._num_restarts = count

    def _publish(self, snapshot: Message) -> None:
        if snapshot["started"] != self._epoch:
            self._epoch = snapshot["started"]
            self._last.clear()
        for name, series in snapshot["series"].items():
            if name not in self._families or name in ("dspark_engine_up", "dspark_engine_restarts"):
                continue
            counter = self._families[name][1]
            for key, value in series.items():
                self._set(name, key, float(value), counter=counter)

    def _set(self, name: str, key: str, value: float, *, counter: bool) -> None:
        previous = self._last.get((name, key))
        if previous == value:
            return
        self._last[name, key] = value
        if counter:
            self._increment(name, key, value - (previous or 0.0))
        else:
            self._metric(name, key).set(value)

    def _increment(self, name: str, key: str, amount: float) -> None:
        self._metric(name, key).increment(max(0.0, amount))

    def _metric(self, name: str, key: str) -> Any:
        metric = self._metrics.get((name, key))
        if metric is None:
            metric = self._families[name][0].Metric(labels={**self._labels, **parse_series_key(key)})
            self._metrics[name, key] = metric
        return metric

    def _add_family(self, name: str, description: str, *, counter: bool) -> None:
        kind = pb_utils.MetricFamily.COUNTER if counter else pb_utils.MetricFamily.GAUGE
        self._families[name] = (pb_utils.MetricFamily(name=name, description=description, kind=kind), counter)
