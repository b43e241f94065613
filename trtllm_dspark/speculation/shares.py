"""Who may verify how much when a round cannot verify every draft."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import IntArray

INTERACTIVE_WEIGHT = 4
"""Drafts an interactive request may verify for each one of a batch request, where not all fit."""


class FairShares:
    """Split a limited verify budget among the requests of a round.

    A share follows from the number of requests of each latency class and from nothing else: what one request samples,
    caps or leaves unused moves no other's share. In turn, whatever one leaves unused stays unused. Shares rest on who
    is there, which is known before anything is drafted, so the schedules stay causal.

    Args:
        draft_len: drafts verified of one request at most.
    """

    def __init__(self, draft_len: int) -> None:
        self._draft_len = draft_len
        self._turn = 0

    def limit(self, caps: IntArray, interactive: NDArray[np.bool_], budget: int) -> IntArray:
        """Return [R] int64 caps whose sum is at most the budget.

        Args:
            caps: [R] int64, drafts of each request that may be verified.
            interactive: [R] bool, whether it is interactive or batch.
            budget: drafts that may be verified in all.
        """
        if budget >= len(caps) * self._draft_len:
            return caps
        self._turn += 1
        weights = np.where(interactive, INTERACTIVE_WEIGHT, 1)
        return np.minimum(caps, shares(weights, max(0, budget), self._draft_len, turn=self._turn))


def shares(weights: IntArray, budget: int, most: int, *, turn: int = 0) -> IntArray:
    """Return [R] int64 shares of `budget` in proportion to weights, each at most `most`.

    What exceeds `most` goes to the others. Drafts are whole: what is left over by rounding down goes to one request
    after the other, the heavier first and among equals by turns, so that in the long run equals get the same.

    Args:
        weights: [R] int64, above 0.
        budget: at least 0.
        most: largest share.
        turn: counts the rounds.
    """
    count = len(weights)
    if budget >= count * most:
        return np.full(count, most, np.int64)
    exact = np.zeros(count)
    full = np.zeros(count, np.bool_)
    while True:
        left = budget - most * int(full.sum())
        exact = np.where(full, most, left * weights / max(1, int(weights[~full].sum())))
        over = ~full & (exact > most)
        if not over.any():
            break
        full |= over
    whole: IntArray = np.floor(exact + 1e-9).astype(np.int64)
    order = np.lexsort(((np.arange(count) + turn) % count, -weights))
    for row in order.tolist():
        if whole.sum() >= budget:
            break
        whole[row] += whole[row] < most
    return whole
