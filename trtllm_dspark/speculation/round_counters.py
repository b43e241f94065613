"""What rounds drafted, admitted, verified and accepted, by position in the block."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core
from trtllm_dspark.engine.base import IntArray

MAX_RECENT = 1024
"""Rounds kept for histograms between two readings."""


class RoundCounters:
    """Counters over all decoding rounds of a controller.

    Args:
        draft_len: drafts of one request at most.

    Attributes:
        predicted_us: microseconds that were predicted for the rounds that were also timed.
        measured_us: microseconds those took.
    """

    def __init__(self, draft_len: int) -> None:
        self._draft_len = draft_len
        self._counts = _core.RoundCounts(draft_len, most_recent=MAX_RECENT)
        self.predicted_us = self.measured_us = 0.0
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=MAX_RECENT)

    @property
    def recent(self) -> deque[tuple[int, int, int]]:
        """(drafts admitted, drafts verified, drafts made) of the latest rounds that drafted; take them out."""
        self._recent.extend(self._counts.take_recent())
        return self._recent

    def add(
        self, caps: IntArray, drafted: NDArray[np.bool_], verify_len: IntArray, accepted: IntArray, budget: int
    ) -> None:
        """Count one round.

        Args:
            caps: [R] int64, drafts of each request that might be verified.
            drafted: [R] bool, requests that drafted.
            verify_len: [R] int64 drafts verified.
            accepted: [R] int64 drafts accepted; negative for a request whose logits were refused.
            budget: drafts of all requests that might be verified.
        """
        self._counts.add(caps, drafted, verify_len, accepted, budget)

    def add_times(self, predicted_us: float, measured_us: float) -> None:
        """Count the predicted and the measured time of one round."""
        self.predicted_us += predicted_us
        self.measured_us += measured_us

    def by_position(self) -> dict[str, Sequence[int]]:
        """Return by stage how often each position got there.

        `drafted`: proposed. `admitted`: allowed by what is left to emit, by load and by shares. `verified`: the target
        decided it. `accepted`: the target agreed, whether or not a stop cut it afterwards.
        """
        counts = self._counts
        return {
            "drafted": [counts.drafted] * self._draft_len,
            "admitted": counts.admitted,
            "verified": counts.verified,
            "accepted": counts.accepted,
        }
