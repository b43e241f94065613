"""What a simulated device's load means for speculation and admission."""

from __future__ import annotations

from trtllm_dspark.load import LoadState
from trtllm_dspark.speculation.controller import LoadLimits


class SimulatedLoad:
    """The load of one replica's device, as the serving code is told of it.

    Args:
        max_batch_size: slots of the replica.
        max_verify_tokens: drafts of a round when all slots draft.

    Attributes:
        state: set at every reading of the device.
    """

    def __init__(self, *, max_batch_size: int, max_verify_tokens: int) -> None:
        self.state = LoadState()
        self._max_batch_size = max_batch_size
        self._max_verify_tokens = max_verify_tokens

    def limits(self) -> LoadLimits:
        """Return the limits of the coming round."""
        state = self.state
        return LoadLimits(
            cost_scale=state.compute_scale,
            verify_budget=state.verify_budget(self._max_verify_tokens) if state.budget_scale < 1 else None,
            max_requests=state.max_requests(self._max_batch_size),
            admit=not state.admission_closed,
            reason=", ".join(state.reasons),
        )
