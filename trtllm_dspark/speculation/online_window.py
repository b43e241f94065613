"""The latest blocks: what the confidence head said, how much was verified, what was accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.speculation.calibration import Reals

_SMALLEST = 1e-7
"""Confidences nearer to 0 or 1 are rounded to this: float32 holds no more."""
HELD_OUT_EVERY = 4
"""Every fourth block is never fitted on."""


@dataclass(frozen=True)
class Blocks:
    """Blocks with outcomes.

    Attributes:
        logits: [N, gamma] float64, of the head without calibration; 0 at positions that were not drafted.
        verified: [N] int64, drafts whose outcome was observed. Draft k, counted from 0, carries a label where k is
            below it; of the drafts behind the cut nothing is known, not even where an earlier one was rejected, or
            the labels of a position would be rejections only.
        accepted: [N] int64, drafts accepted.
        serial: [N] int64, how many blocks came before each.
    """

    logits: Reals
    verified: IntArray
    accepted: IntArray
    serial: IntArray

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.accepted)

    def where(self, rows: NDArray[np.bool_]) -> Blocks:
        """Return the blocks of these rows."""
        return Blocks(self.logits[rows], self.verified[rows], self.accepted[rows], self.serial[rows])

    def since(self, serial: int) -> Blocks:
        """Return the blocks from this serial on."""
        return self.where(self.serial >= serial)

    def newest(self, count: int) -> Blocks:
        """Return the newest blocks."""
        return self.since(int(self.serial.max(initial=-1)) + 1 - count)

    def fitted_on(self) -> Blocks:
        """Return the blocks that a fit may see."""
        return self.where(self.serial % HELD_OUT_EVERY != 0)

    def held_out(self) -> Blocks:
        """Return the blocks that no fit sees."""
        return self.where(self.serial % HELD_OUT_EVERY == 0)

    def labelled(self) -> NDArray[np.bool_]:
        """Return [N, gamma] whether each draft carries a label."""
        return np.arange(self.logits.shape[1]) < self.verified[:, None]

    def survived(self) -> NDArray[np.bool_]:
        """Return [N, gamma] whether the drafts up to each were all accepted; meaningful where labelled."""
        return np.arange(self.logits.shape[1]) < self.accepted[:, None]


class BlockWindow:
    """A ring of the latest blocks.

    Args:
        max_draft_len: gamma.
        size: blocks kept.
    """

    def __init__(self, max_draft_len: int, size: int) -> None:
        self.size = size
        self.count = 0
        self._logits = np.zeros((size, max_draft_len))
        self._verified = np.zeros(size, np.int64)
        self._accepted = np.zeros(size, np.int64)
        self._serial = np.full(size, -1, np.int64)

    def add(self, confidence: FloatArray, verified: IntArray, accepted: IntArray) -> None:
        """Add blocks, oldest first; those of which nothing was verified carry no label and are left out.

        Args:
            confidence: [N, n] float32 without calibration, n at most gamma.
            verified: [N] int64 drafts verified.
            accepted: [N] int64 drafts accepted.
        """
        usable = verified > 0
        serial = self.count + np.arange(int(usable.sum()))
        self.count += len(serial)
        # Of more blocks than the ring holds only the last matter.
        slots, drafted = serial[-self.size :] % self.size, confidence.shape[1]
        clipped = np.clip(confidence[usable][-self.size :].astype(np.float64), _SMALLEST, 1 - _SMALLEST)
        self._logits[slots, :drafted] = np.log(clipped / (1 - clipped))
        self._logits[slots, drafted:] = 0.0
        self._verified[slots] = verified[usable][-self.size :]
        self._accepted[slots] = accepted[usable][-self.size :]
        self._serial[slots] = serial[-self.size :]

    def blocks(self) -> Blocks:
        """Return the blocks held, in no particular order."""
        held = min(self.count, self.size)
        return Blocks(self._logits[:held], self._verified[:held], self._accepted[:held], self._serial[:held])
