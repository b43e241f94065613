"""The thread that samples, and the snapshot that everybody else reads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.load.metrics import load_metrics
from trtllm_dspark.load.nvml_reader import NvmlReader
from trtllm_dspark.load.policy import LoadPolicy
from trtllm_dspark.load.sample import Failure, Sample
from trtllm_dspark.load.state import LoadState

logger = logging.getLogger(__name__)

INTERVAL_S = 0.2
# After a failure the library is initialised again, which is not done five times a second.
RETRY_S = 2.0
RETRY_ABSENT_S = 30.0
STALE_S = 5.0
_ABSENT: tuple[Failure, ...] = ("no_driver", "no_gpu")


class Reader(Protocol):
    """Where samples come from."""

    def read(self) -> Sample:
        """Return the next sample."""

    def close(self) -> None:
        """Let go of the device."""


class _Snapshot(NamedTuple):
    """What one sample left behind; replaced as a whole, never changed."""

    sample: Sample | None
    state: LoadState
    expires_s: float
    expired: LoadState


class LoadMonitor:
    """Sample a device five times a second in a thread of its own and keep the latest decision.

    Reading is one attribute read: it takes no lock, calls no library and never raises, so a hanging driver costs the
    step loop nothing. A decision that no sample renewed for `STALE_S` becomes neutral, with the reason `stale`; only a
    lost or faulty GPU stays closed.

    Use it as a context manager, or call `start` and `stop`. Start it when the engine holds its memory: what is free at
    the first sample is taken as normal. Where another engine is loaded or closed later, call `rebase_memory`.

    Args:
        reader: where samples come from; None = NVML's device 0.
        policy: turns samples into decisions; None = the documented one.
        interval_s: seconds between samples.
        clock: monotonic seconds.

    Raises:
        ConfigError: the interval is not positive.
    """

    def __init__(
        self,
        reader: Reader | None = None,
        policy: LoadPolicy | None = None,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not interval_s > 0:
            raise ConfigError(f"load monitor: interval_s is {interval_s}; it must be positive")
        self._reader: Reader = reader or NvmlReader()
        self._policy = policy or LoadPolicy()
        self._interval_s = interval_s
        self._clock = clock
        self._snapshot = _Snapshot(None, LoadState(), float("inf"), LoadState())
        self._rebase = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._left_behind: threading.Thread | None = None
        self._said: set[Failure] = set()
        self._num_samples = self._num_failures = self._num_xids = self._num_changes = 0

    def start(self) -> None:
        """Start sampling; a second call does nothing.

        After a `stop` that left a hanging thread behind, the new one waits for its end: two threads in one library
        would share a handle.
        """
        if self._thread is None:
            # One event a thread: the next start must not wake a thread that was told to end.
            self._stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stopping, self._left_behind), name="dspark-load", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread; one that hangs inside the driver is left behind (it is a daemon)."""
        thread, self._thread = self._thread, None
        self._stopping.set()
        if thread is not None:
            thread.join(timeout=RETRY_S)
            self._left_behind = thread if thread.is_alive() else None

    def rebase_memory(self) -> None:
        """Take what is free from now on as normal: an engine of this process was loaded or closed."""
        self._rebase.set()

    def state(self) -> LoadState:
        """Return the decision in force."""
        snapshot = self._snapshot
        return snapshot.state if self._clock() < snapshot.expires_s else snapshot.expired

    def sample(self) -> Sample | None:
        """Return the latest sample; None before the first."""
        return self._snapshot.sample

    def metrics(self) -> dict[str, float]:
        """Return inputs, decisions and counters under the names of docs/load.md."""
        return {
            **load_metrics(self._snapshot.sample, self.state()),
            "dspark_load_samples": float(self._num_samples),
            "dspark_load_failures": float(self._num_failures),
            "dspark_load_xids": float(self._num_xids),
            "dspark_load_changes": float(self._num_changes),
        }

    def __enter__(self) -> LoadMonitor:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self, stopping: threading.Event, before: threading.Thread | None) -> None:
        while before is not None and before.is_alive():
            if stopping.wait(self._interval_s):
                return
        while not stopping.is_set():
            pause = self._step()
            if pause is None:
                break
            stopping.wait(pause)
        self._reader.close()

    def _step(self) -> float | None:
        """Take one sample; return the seconds until the next, None when there will never be one."""
        try:
            # Before the reading: one that was under way when the memory changed says nothing.
            if self._rebase.is_set():
                self._rebase.clear()
                self._policy.rebase_memory()
            sample = self._reader.read()
            state = self._policy.update(sample)
        except Exception as error:  # whatever a binding raises, serving goes on
            sample = Sample(self._clock(), failure="unreadable", message=f"{type(error).__name__}: {error}")
            state = self._policy.update(sample)
        pause = self._pause(sample.failure)
        expires = float("inf") if pause is None else self._clock() + pause + STALE_S
        before, self._snapshot = self._snapshot, _Snapshot(sample, state, expires, _expired(state))
        # Last: whoever sees the count sees the decision too.
        self._count(sample, state, before)
        return pause

    def _pause(self, failure: Failure | None) -> float | None:
        if failure is None:
            return self._interval_s
        if failure == "no_library":
            return None
        return max(self._interval_s, RETRY_ABSENT_S if failure in _ABSENT else RETRY_S)

    def _count(self, sample: Sample, state: LoadState, before: _Snapshot) -> None:
        self._num_xids += len(sample.xids)
        if sample.failure is None:
            self._said.clear()
        else:
            self._num_failures += 1
            if sample.failure not in self._said:
                self._said.add(sample.failure)
                logger.warning("not adapting to the GPU's load: %s", sample.message)
        if state != before.state and before.sample is not None:
            self._num_changes += 1
            logger.info("load: %s", state)
        self._num_samples += 1


def _expired(state: LoadState) -> LoadState:
    """Return what is left of a decision that nobody renewed: a hang must not open what a fault closed."""
    if {"gpu_lost", "gpu_fault"} & set(state.reasons):
        return replace(state, reasons=(*state.reasons, "stale"))
    return LoadState(reasons=("stale",))
