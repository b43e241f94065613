"""What a source of drafts has been worth: how often drafts survived, by kind and position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_dspark.engine.base import FloatArray

PRIOR = 4.0
"""Tries that what is assumed before the first outcome counts for."""
ASSUMED = 0.5
MEMORY = 0.995
"""Weight of an outcome after one more of its kind: texts change."""


class Worth:
    """Rates at which the draft at each position was right, given that all before it were.

    Args:
        num_kinds: kinds of proposals, counted apart.
        draft_len: positions.
    """

    def __init__(self, num_kinds: int, draft_len: int) -> None:
        self.tried = np.full((num_kinds, draft_len), PRIOR)
        self.kept = np.full((num_kinds, draft_len), PRIOR * ASSUMED)

    def count(self, kind: int, tested: int, right: int) -> None:
        """Count a proposal of which `tested` drafts were compared and the first `right` of them were right."""
        reached = min(tested, right + 1)
        self.tried[kind, :reached] = MEMORY * self.tried[kind, :reached] + 1
        self.kept[kind, :reached] *= MEMORY
        self.kept[kind, :right] += 1

    def compare(self, kind: int, drafts: Sequence[int], tokens: Sequence[int]) -> None:
        """Count a proposal by the tokens that were emitted in its place, however many of each there are."""
        tested = min(len(drafts), len(tokens))
        right = 0
        while right < tested and drafts[right] == tokens[right]:
            right += 1
        self.count(kind, tested, right)

    def rates(self, num_steps: int) -> FloatArray:
        """Return [kinds, num_steps] float32 rates."""
        rates: FloatArray = (self.kept[:, :num_steps] / self.tried[:, :num_steps]).astype(np.float32)
        return rates

    def accepted(self, num_steps: int) -> FloatArray:
        """Return [kinds] float32: drafts of `num_steps` that are right on average before the first wrong one."""
        expected: FloatArray = np.cumprod(self.rates(num_steps), axis=1).sum(1)
        return expected
