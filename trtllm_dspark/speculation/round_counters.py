"""What rounds drafted, admitted, verified and accepted, by position in the block."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import IntArray

MAX_RECENT = 1024
"""Rounds kept for histograms between two readings."""
_ROUNDS = 256
"""Rounds that are kept until they are counted together."""


class RoundCounters:
    """Counters over all decoding rounds of a controller.

    A round is only written down; many are counted at once, when somebody reads or enough have come together.

    Args:
        draft_len: drafts of one request at most.

    Attributes:
        predicted_us: microseconds that were predicted for the rounds that were also timed.
        measured_us: microseconds those took.
    """

    def __init__(self, draft_len: int) -> None:
        self._draft_len = draft_len
        self._drafted = 0
        # By length; how many have none does not matter.
        self._admitted, self._verified, self._accepted = (np.zeros(draft_len + 1, np.int64) for _ in range(3))
        self.predicted_us = self.measured_us = 0.0
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=MAX_RECENT)
        # Rounds written down: caps, who drafted, drafts verified and accepted; requests before each, and its budget.
        self._rounds: list[tuple[IntArray, NDArray[np.bool_], IntArray, IntArray]] = []
        self._starts: list[int] = []
        self._budgets: list[int] = []
        self._filled = 0

    @property
    def recent(self) -> deque[tuple[int, int, int]]:
        """(drafts admitted, drafts verified, drafts made) of the latest rounds that drafted; take them out."""
        self._count()
        return self._recent

    def add(
        self, caps: IntArray, drafted: NDArray[np.bool_], verify_len: IntArray, accepted: IntArray, budget: int
    ) -> None:
        """Note one round; its arrays are kept for a while and must not change.

        Args:
            caps: [R] int64, drafts of each request that might be verified.
            drafted: [R] bool, requests that drafted.
            verify_len: [R] int64 drafts verified.
            accepted: [R] int64 drafts accepted; negative for a request whose logits were refused.
            budget: drafts of all requests that might be verified.
        """
        if not np.count_nonzero(drafted):
            return
        self._rounds.append((caps, drafted, verify_len, accepted))
        self._starts.append(self._filled)
        self._budgets.append(budget)
        self._filled += len(caps)
        if len(self._budgets) >= _ROUNDS:
            self._count()

    def _count(self) -> None:
        """Count the rounds that were written down."""
        if not self._budgets:
            return
        columns = zip(*self._rounds, strict=True)
        allowed, drafted, verified, accepted = (np.concatenate(column) for column in columns)
        accepted = np.maximum(accepted, 0)
        if not drafted.all():
            # Whoever drafted nothing got to no position.
            allowed, verified, accepted = allowed * drafted, verified * drafted, accepted * drafted
        size = self._draft_len + 1
        self._admitted += np.bincount(allowed, minlength=size)
        self._verified += np.bincount(verified, minlength=size)
        self._accepted += np.bincount(accepted, minlength=size)
        allowed, made, verified = (
            np.add.reduceat(column, self._starts, dtype=np.int64) for column in (allowed, drafted, verified)
        )
        self._drafted += int(made.sum())
        rounds = (np.minimum(self._budgets, allowed), verified, made * self._draft_len)
        self._recent.extend(zip(*(column.tolist() for column in rounds), strict=True))
        self._rounds.clear()
        self._starts.clear()
        self._budgets.clear()
        self._filled = 0

    def add_times(self, predicted_us: float, measured_us: float) -> None:
        """Count the predicted and the measured time of one round."""
        self.predicted_us += predicted_us
        self.measured_us += measured_us

    def by_position(self) -> dict[str, Sequence[int]]:
        """Return by stage how often each position got there.

        `drafted`: proposed. `admitted`: allowed by what is left to emit, by load and by shares. `verified`: the target
        decided it. `accepted`: the target agreed, whether or not a stop cut it afterwards.
        """
        self._count()
        stages = {"admitted": self._admitted, "verified": self._verified, "accepted": self._accepted}
        at_least = {name: np.cumsum(lengths[::-1])[::-1][1:].tolist() for name, lengths in stages.items()}
        return {"drafted": [self._drafted] * self._draft_len, **at_least}
