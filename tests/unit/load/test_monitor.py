"""The sampler's thread and what its readers see, on readers of our own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.load import LoadMonitor, LoadState, Sample
from trtllm_dspark.load.monitor import Reader

DEADLINE_S = 20.0


class Scripted:
    """A reader that does one thing after the other and repeats the last."""

    def __init__(self, *script: Sample | Exception | Callable[[], Sample]) -> None:
        self.script: Iterator[Sample | Exception | Callable[[], Sample]] = iter(script[:-1])
        self.last = script[-1]
        self.closed = threading.Event()

    def read(self) -> Sample:
        action = next(self.script, self.last)
        if isinstance(action, Exception):
            raise action
        return replace(action, time_s=time.monotonic()) if isinstance(action, Sample) else action()

    def close(self) -> None:
        self.closed.set()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the monitor never got there"
        time.sleep(0.002)


def monitor_of(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> LoadMonitor:
    """Return a monitor that does not wait long after a failure."""
    monkeypatch.setattr("trtllm_dspark.load.monitor.RETRY_S", 0.01)
    monkeypatch.setattr("trtllm_dspark.load.monitor.RETRY_ABSENT_S", 0.01)
    return LoadMonitor(reader, interval_s=0.005)


def test_state_before_the_first_sample_is_neutral() -> None:
    monitor = LoadMonitor(Scripted(Sample(0.0)))
    assert monitor.state() == LoadState()
    assert monitor.sample() is None


def test_exception_of_the_reader_neither_ends_the_thread_nor_reaches_state(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Scripted(Sample(0.0), OSError("segment"), ValueError("bits"), Sample(0.0, sm_clock_mhz=7))
    with caplog.at_level(logging.WARNING), monitor_of(reader, monkeypatch) as monitor:
        wait_for(lambda: (monitor.sample() or Sample(0.0)).sm_clock_mhz == 7)
        assert monitor.state().available
        assert monitor.metrics()["dspark_load_failures"] == 2.0
    assert [record.getMessage() for record in caplog.records] == ["not adapting to the GPU's load: OSError: segment"]
    assert reader.closed.is_set()


def test_missing_library_is_said_once_and_ends_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Scripted(Sample(0.0, failure="no_library", message="not installed"))
    with caplog.at_level(logging.WARNING), monitor_of(reader, monkeypatch) as monitor:
        assert reader.closed.wait(DEADLINE_S)
        assert monitor.state() == LoadState(reasons=("no_library",))
        assert monitor.metrics()["dspark_load_samples"] == 1.0
    assert len(caplog.records) == 1


def test_absent_driver_is_said_once_however_often_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Scripted(Sample(0.0, failure="no_driver", message="not loaded"))
    with caplog.at_level(logging.WARNING), monitor_of(reader, monkeypatch) as monitor:
        wait_for(lambda: monitor.metrics()["dspark_load_samples"] > 3)
        assert monitor.state() == LoadState(reasons=("no_driver",))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (Sample(0.0), LoadState(reasons=("stale",))),
        (
            Sample(0.0, failure="gpu_lost"),
            LoadState(budget_scale=0.0, admission_scale=0.0, reasons=("gpu_lost", "stale")),
        ),
    ],
)
def test_reader_that_hangs_leaves_a_stale_state(
    monkeypatch: pytest.MonkeyPatch, before: Sample, expected: LoadState
) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang() -> Sample:
        hanging.set()
        release.wait(DEADLINE_S)
        return Sample(time.monotonic())

    monkeypatch.setattr("trtllm_dspark.load.monitor.STALE_S", 0.05)
    with monitor_of(Scripted(before, hang), monkeypatch) as monitor:
        assert hanging.wait(DEADLINE_S)
        wait_for(lambda: monitor.state() == expected)
        assert monitor.metrics()["dspark_load_reason_stale"] == 1.0
        release.set()


def test_start_and_stop_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = monitor_of(Scripted(Sample(0.0)), monkeypatch)
    before = threading.active_count()
    for _ in range(3):
        monitor.start()
        monitor.start()
        assert threading.active_count() == before + 1
        monitor.stop()
        monitor.stop()
    assert threading.active_count() == before


def test_thread_that_hangs_over_a_stop_ends_and_never_samples_beside_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hanging, release = threading.Event(), threading.Event()
    inside, most = [], []

    class Reader:
        def read(self) -> Sample:
            inside.append(threading.current_thread())
            most.append(len(inside))
            if not hanging.is_set():
                hanging.set()
                release.wait(DEADLINE_S)
            inside.pop()
            return Sample(time.monotonic(), sm_clock_mhz=9)

        def close(self) -> None:
            pass

    monitor = monitor_of(Reader(), monkeypatch)
    before = threading.active_count()
    monitor.start()
    assert hanging.wait(DEADLINE_S)
    monitor.stop()
    assert threading.active_count() == before + 1
    monitor.start()
    time.sleep(0.05)
    assert monitor.sample() is None
    release.set()
    wait_for(lambda: monitor.metrics()["dspark_load_samples"] > 3)
    # The first thread ended although the second start came before its end; of two, one runs.
    assert threading.active_count() == before + 1
    assert max(most) == 1
    monitor.stop()
    assert threading.active_count() == before


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan")])
def test_interval_that_is_not_positive_is_refused(interval_s: float) -> None:
    with pytest.raises(ConfigError, match="interval_s"):
        LoadMonitor(Scripted(Sample(0.0)), interval_s=interval_s)
