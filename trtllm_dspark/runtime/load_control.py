"""The load of the GPU as limits of the next round."""

from __future__ import annotations

from typing import Protocol

from trtllm_dspark.load import LoadMonitor, LoadPolicy, LoadState, NvmlReader
from trtllm_dspark.speculation.controller import LoadLimits


class EngineShapes(Protocol):
    """The limits of an engine that count here; those of a loaded engine and of a manifest have them."""

    @property
    def max_batch_size(self) -> int:
        """Slots."""
        ...

    @property
    def max_num_tokens(self) -> int:
        """Tokens of a round."""
        ...

    @property
    def max_draft_len(self) -> int:
        """Drafts of a block."""
        ...


class LoadControl:
    """Turn the monitor's decisions into limits; a `LoadSource` for sessions.

    The monitor samples in a thread of its own and holds its decisions with hysteresis (docs/load.md). `limits` reads
    one attribute and compares it: it takes no lock, calls no library and raises nothing, whatever the driver does.

    Args:
        monitor: samples and decides; started and stopped with this.
        max_requests: slots of the engine.
        max_drafts: drafts that a full round verifies at most.
    """

    def __init__(self, monitor: LoadMonitor, *, max_requests: int, max_drafts: int) -> None:
        self.monitor = monitor
        self._max_requests = max_requests
        self.max_drafts = max_drafts
        self._state = LoadState()
        self._limits = LoadLimits()

    @staticmethod
    def for_engine(
        limits: EngineShapes, *, device: int | str = 0, reference_sm_clock_mhz: int | None = None
    ) -> LoadControl:
        """Return the control of an engine on a GPU, as NVML numbers devices or by UUID."""
        monitor = LoadMonitor(NvmlReader(device), LoadPolicy(reference_sm_clock_mhz=reference_sm_clock_mhz))
        requests = limits.max_batch_size
        drafts = min(requests * limits.max_draft_len, limits.max_num_tokens - requests)
        return LoadControl(monitor, max_requests=requests, max_drafts=drafts)

    def start(self) -> None:
        """Start sampling, once the engine holds its memory: what is free then is taken as normal."""
        self.monitor.start()

    def stop(self) -> None:
        """Stop sampling."""
        self.monitor.stop()

    def rebase_memory(self) -> None:
        """Take what is free from now on as normal: another engine was loaded, or one was closed."""
        self.monitor.rebase_memory()

    def limits(self) -> LoadLimits:
        """Return the limits of the coming round."""
        state = self.monitor.state()
        if state is not self._state:
            self._state, self._limits = state, self._limits_of(state)
        return self._limits

    def request_limit(self) -> int | None:
        """Return how many requests may run on the GPU now; None = the load limits them no further than the slots do."""
        limits = self.limits()
        return limits.max_requests if limits.admit else 0

    def allowed(self) -> int:
        """Return how many requests the engine may run now."""
        limit = self.request_limit()
        return self._max_requests if limit is None else limit

    def metrics(self) -> dict[str, float]:
        """Return what was read and decided, under the names of docs/load.md."""
        return self.monitor.metrics()

    def __enter__(self) -> LoadControl:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _limits_of(self, state: LoadState) -> LoadLimits:
        return LoadLimits(
            cost_scale=state.compute_scale,
            verify_budget=None if state.budget_scale >= 1 else state.verify_budget(self.max_drafts),
            max_requests=None if state.admission_scale >= 1 else state.max_requests(self._max_requests),
            admit=not state.admission_closed,
            reason=", ".join(state.reasons),
        )
