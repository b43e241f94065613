"""Who wants to see what every round computed, on the session's thread and without delaying it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.outputs import RequestOutput

if TYPE_CHECKING:
    from trtllm_dspark.runtime.round import Choice, DecodePass


class RoundListener(Protocol):
    """Told of every round that ran on the host."""

    def round(self, decode: DecodePass, chosen: Sequence[tuple[ActiveRequest, Choice]]) -> None:
        """See the target's outputs and what became of them, before the requests take the tokens in."""
        ...

    def committed(self, request: ActiveRequest, output: RequestOutput) -> None:
        """See what a request gained, its last output included."""
        ...
