"""What rounds drafted, admitted, verified and accepted, by position in the block."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import IntArray

MAX_RECENT = 1024
"""Rounds kept for histograms between two readings."""


class RoundCounters:
    """Counters over all decoding rounds of a controller; a few array operations a round.

    Args:
        draft_len: drafts of one request at most.

    Attributes:
        predicted_us: microseconds that were predicted for the rounds that were also timed.
        measured_us: microseconds those took.
        recent: (drafts admitted, drafts verified, drafts made) of the latest rounds that drafted; take them out.
    """

    def __init__(self, draft_len: int) -> None:
        self._draft_len = draft_len
        self._drafted = 0
        self._admitted, self._verified, self._accepted = (np.zeros(draft_len + 1, np.int64) for _ in range(3))
        self.predicted_us = self.measured_us = 0.0
        self.recent: deque[tuple[int, int, int]] = deque(maxlen=MAX_RECENT)

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
        rows = int(np.count_nonzero(drafted))
        if not rows:
            return
        size = self._draft_len + 1
        self._drafted += rows
        self._admitted += np.bincount(caps[drafted], minlength=size)
        self._verified += np.bincount(verify_len[drafted], minlength=size)
        self._accepted += np.bincount(np.maximum(accepted[drafted], 0), minlength=size)
        admitted = min(budget, int(caps[drafted].sum()))
        self.recent.append((admitted, int(verify_len[drafted].sum()), rows * self._draft_len))

    def add_times(self, predicted_us: float, measured_us: float) -> None:
        """Count the predicted and the measured time of one round."""
        self.predicted_us += predicted_us
        self.measured_us += measured_us

    def by_position(self) -> dict[str, Sequence[int]]:
        """Return by stage how often each position got there.

        `drafted`: proposed. `admitted`: allowed by what is left to emit, by load and by shares. `verified`: the target
        decided it. `accepted`: the target agreed, whether or not a stop cut it afterwards.
        """
        stages = {"admitted": self._admitted, "verified": self._verified, "accepted": self._accepted}
        at_least = {name: np.cumsum(lengths[::-1])[::-1][1:].tolist() for name, lengths in stages.items()}
        return {"drafted": [self._drafted] * self._draft_len, **at_least}
