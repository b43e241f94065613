"""Collect what the confidence head said and what came of it."""

from __future__ import annotations

import numpy as np

from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.speculation.calibration import Observations

_SMALLEST = 1e-7
"""Confidences nearer to 0 or 1 are rounded to this: float32 holds no more."""


class ConfidenceRecorder:
    """Keep confidences and accepted lengths of the blocks that were verified in full.

    A block that was cut says nothing about the drafts behind the cut; it is left out.

    Args:
        max_draft_len: gamma.
    """

    def __init__(self, max_draft_len: int) -> None:
        self._gamma = max_draft_len
        self._confidence: list[FloatArray] = []
        self._accepted: list[IntArray] = []

    def record(self, confidence: FloatArray, verify_len: IntArray, accepted_len: IntArray) -> None:
        """Add one round.

        Args:
            confidence: [R, gamma] float32 without calibration.
            verify_len: [R] int64 drafts verified.
            accepted_len: [R] int64 drafts accepted.
        """
        whole = verify_len == self._gamma
        self._confidence.append(confidence[whole])
        self._accepted.append(accepted_len[whole])

    def observations(self) -> Observations:
        """Return everything recorded."""
        if not self._accepted:
            return Observations(np.zeros((0, self._gamma)), np.zeros(0, np.int64))
        confidence = np.clip(np.concatenate(self._confidence).astype(np.float64), _SMALLEST, 1 - _SMALLEST)
        return Observations(np.log(confidence / (1 - confidence)), np.concatenate(self._accepted))
