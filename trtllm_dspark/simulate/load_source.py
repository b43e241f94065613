"""A simulated device's load in the place of the thread that samples a real one."""

from __future__ import annotations

from typing import cast

from trtllm_dspark.load import LoadMonitor, LoadState
from trtllm_dspark.runtime.load_control import LoadControl
from trtllm_dspark.simulate.server import Server


class SimulatedMonitor:
    """Decisions of a load policy on simulated readings.

    Attributes:
        now: decisions in force; set at every reading of the device.
    """

    def __init__(self) -> None:
        self.now = LoadState()

    def state(self) -> LoadState:
        """See `LoadMonitor`."""
        return self.now


def load_control(monitor: SimulatedMonitor, server: Server, max_draft_len: int) -> LoadControl:
    """Return the serving code's load limits over a simulated monitor, of which it reads the state alone."""
    requests = server.max_batch_size
    drafts = min(requests * max_draft_len, server.max_num_tokens - requests)
    return LoadControl(cast(LoadMonitor, monitor), max_requests=requests, max_drafts=drafts)
