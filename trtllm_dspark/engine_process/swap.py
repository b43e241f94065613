"""Swap in another drafter while requests run: load it, try it on a share of the requests, keep the better one.

A second session takes a share of the new requests. Both choose the target's tokens, so no client can tell; what differs
is the accepted length. Once the difference is certain the better session serves alone, the other one finishes what it
runs and is closed. No request moves from one to the other.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from trtllm_dspark.engine_process.lanes import Lane, LaneSet
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.sequential import RatioSums, difference_interval
from trtllm_dspark.errors import DsparkError, UsageError
from trtllm_dspark.speculation.statistics import AcceptanceStatistics

logger = logging.getLogger(__name__)

STARVED_S = 30.0
"""A trial during which the load of the device lets no request start for so long ends: it holds memory for nothing."""


class SwapState(enum.Enum):
    """Where a swap is."""

    IDLE = "idle"
    LOADING = "loading"
    TRIAL = "trial"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """How a candidate is tried.

    Attributes:
        share: fraction of the new requests it gets.
        alpha: probability of taking a drafter for better or worse that is not.
        margin: how much shorter its accepted length may be, in tokens a round; 0 asks that it be longer.
        min_requests: finished requests of each arm before anything is decided.
        max_requests: finished requests of both after which an undecided candidate goes.
    """

    share: float = 0.5
    alpha: float = 0.05
    margin: float = 0.0
    min_requests: int = 20
    max_requests: int = 5000

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: naming the value.
        """
        if not 0.0 < self.share < 1.0:
            raise UsageError(f"the candidate's share is {self.share}; give a fraction between 0 and 1")
        if not 0.0 < self.alpha < 1.0:
            raise UsageError(f"alpha is {self.alpha}; give a probability between 0 and 1")
        if not 0.0 <= self.margin < 100.0:
            raise UsageError(f"the margin is {self.margin}; give tokens a round, 0 or more")
        if not 2 <= self.min_requests <= self.max_requests:
            raise UsageError(
                f"min_requests is {self.min_requests} and max_requests {self.max_requests}; give 2 <= min <= max"
            )


class DrafterSwap:
    """At most one swap at a time.

    Args:
        lanes: of the loop.
        open_lane: loads an engine directory; called on a thread of its own.
        metrics: where it is counted.
        wake: makes an idle loop call `poll`.
        on_promoted: told of the new serving lane, on the loop's thread.
        on_memory_changed: called when a lane was opened or closed, on the loop's thread.
    """

    def __init__(
        self,
        lanes: LaneSet,
        open_lane: Callable[[str], Lane],
        metrics: EngineMetrics,
        *,
        wake: Callable[[], None],
        on_promoted: Callable[[Lane], None] = lambda lane: None,
        on_memory_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._lanes = lanes
        self._open_lane = open_lane
        self._metrics = metrics
        self._wake = wake
        self._on_promoted = on_promoted
        self._on_memory_changed = on_memory_changed
        self._lock = threading.Lock()
        self._state = SwapState.IDLE
        self._options = TrialOptions()
        self._engine_dir = ""
        self._loaded: Lane | str | None = None
        self._aborted = ""
        self._starved_since: float | None = None
        self._sums = {"incumbent": RatioSums(), "candidate": RatioSums()}
        self._interval: tuple[float, float] | None = None
        self._outcome: dict[str, Any] = {}
        self._set_state(SwapState.IDLE)

    # Called from any thread.

    def start(self, engine_dir: str, options: TrialOptions) -> None:
        """Begin to load a candidate.

        Raises:
            UsageError: a value is out of range, or another swap is under way.
        """
        options.check()
        with self._lock:
            if self._state is not SwapState.IDLE:
                raise UsageError(f"a swap is under way ({self._state.value}); wait for its end or abort it")
            self._options, self._engine_dir, self._aborted = options, engine_dir, ""
            self._sums = {"incumbent": RatioSums(), "candidate": RatioSums()}
            self._interval, self._outcome = None, {}
            self._set_state(SwapState.LOADING)
        threading.Thread(target=self._load, args=(engine_dir,), name="swap-load", daemon=True).start()

    def abort(self) -> None:
        """End a trial for the incumbent; harmless without one."""
        self._aborted = "asked to"
        self._wake()

    def status(self) -> dict[str, Any]:
        """Return the state, the figures of the trial and the outcome of the last swap, as plain values."""
        low, high = self._interval or (None, None)
        return {
            "state": self._state.value,
            "serving_engine_dir": self._lanes.serving.engine_dir,
            "candidate_engine_dir": self._engine_dir,
            "options": asdict(self._options),
            "requests": {name: sums.requests for name, sums in self._sums.items()},
            "accepted_len": {name: sums.accepted_len for name, sums in self._sums.items()},
            "difference_low": low,
            "difference_high": high,
            **self._outcome,
        }

    # The loop's thread.

    def poll(self) -> None:
        """Act on what happened since the last call; costs nothing while there is no swap."""
        if self._state is SwapState.IDLE:
            return
        if self._state is SwapState.LOADING and self._loaded is not None:
            self._begin_trial()
        if self._state is SwapState.TRIAL and self._aborted:
            self._end("aborted", self._aborted)
        if self._state is SwapState.TRIAL and self._starved():
            self._end("failed", f"the load of the device let no request start for {STARVED_S:g} s")
        if self._state is SwapState.DRAINING:
            self._close_empty_lane()

    def finished(self, lane: Lane, counts: AcceptanceStatistics) -> None:
        """Count a request that ended by itself, and decide where that makes the difference certain."""
        if self._state is not SwapState.TRIAL or not counts.rounds:
            return
        name = "candidate" if lane is self._lanes.beside else "incumbent"
        sums = self._sums[name]
        sums.add(counts.emitted, counts.rounds)
        self._metrics.add("dspark_swap_requests", arm=name)
        self._metrics.set("dspark_swap_accepted_len", sums.accepted_len or 0.0, arm=name)
        self._decide()

    def lane_failed(self, lane: Lane) -> None:
        """Take a lane out whose engine failed; its requests have been told."""
        if self._state is SwapState.TRIAL and lane is self._lanes.beside:
            self._end("failed", f"its engine failed ({lane.session.failure})")
        lane.running.clear()
        lane.ending.clear()

    def _load(self, engine_dir: str) -> None:
        try:
            loaded: Lane | str = self._open_lane(engine_dir)
        except DsparkError as error:
            loaded = str(error)
        except Exception as error:
            logger.exception("a candidate could not be loaded")
            loaded = f"{type(error).__name__}: {error}"
        self._loaded = loaded
        self._wake()

    def _begin_trial(self) -> None:
        loaded, self._loaded = self._loaded, None
        if not isinstance(loaded, Lane):
            self._finish("failed", str(loaded))
            self._set_state(SwapState.IDLE)
            return
        self._lanes.beside, self._lanes.share = loaded, self._options.share
        # What the candidate takes is no pressure: it must not close admission, or nothing would ever end its trial.
        self._on_memory_changed()
        self._starved_since = None
        logger.warning("trying the drafter of %s on %g of the requests", self._engine_dir, self._options.share)
        self._set_state(SwapState.TRIAL)

    def _starved(self) -> bool:
        """Whether admission has been closed for too long."""
        watch, now = self._lanes.serving.request_limit, time.monotonic()
        if watch is None or watch() != 0:
            self._starved_since = None
            return False
        self._starved_since = now if self._starved_since is None else self._starved_since
        return now - self._starved_since >= STARVED_S

    def _decide(self) -> None:
        options, sums = self._options, self._sums
        if min(arm.requests for arm in sums.values()) < options.min_requests:
            return
        self._interval = difference_interval(sums["incumbent"], sums["candidate"], alpha=options.alpha)
        if self._interval is None:
            return
        low, high = self._interval
        self._metrics.set("dspark_swap_difference", low, bound="low")
        self._metrics.set("dspark_swap_difference", high, bound="high")
        if low > -options.margin:
            self._end("promoted", "its accepted length is longer" if low > 0 else "it is within the margin")
        elif high < -options.margin:
            self._end("rolled_back", "its accepted length is shorter")
        elif sum(arm.requests for arm in sums.values()) >= options.max_requests:
            self._end("rolled_back", f"no difference was found in {options.max_requests} requests")

    def _end(self, outcome: str, reason: str) -> None:
        """Let the better lane serve alone; the other one empties."""
        lanes, candidate = self._lanes, self._lanes.beside
        if candidate is None:
            return
        if outcome == "promoted":
            lanes.serving, lanes.beside = candidate, lanes.serving
            self._on_promoted(candidate)
        lanes.share = 0.0
        (lanes.beside or candidate).draining = True
        self._finish(outcome, reason)
        self._set_state(SwapState.DRAINING)

    def _finish(self, outcome: str, reason: str) -> None:
        self._outcome = {"outcome": outcome, "reason": reason}
        self._metrics.add("dspark_swaps", outcome=outcome)
        logger.warning("the drafter of %s: %s (%s)", self._engine_dir, outcome.replace("_", " "), reason)

    def _close_empty_lane(self) -> None:
        lane = self._lanes.beside
        if lane is None or (lane.busy and lane.session.failure is None):
            return
        self._lanes.beside = None
        lane.session.close()
        self._on_memory_changed()
        self._set_state(SwapState.IDLE)

    def _set_state(self, state: SwapState) -> None:
        self._state = state
        for each in SwapState:
            self._metrics.set("dspark_swap_state", float(each is state), state=each.value)
