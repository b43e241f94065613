"""The blocks of all domains in one array, and every request's place in it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.simulate.blocks import Blocks

_SMALLEST = 1e-7


class BlockPool:
    """Blocks by domain; a request meets consecutive ones, and the first again after the last.

    Attributes:
        logits: [N, gamma] float32 of the confidence head, without calibration.
        accepted: [N] int64 drafts accepted of a block that is verified in full.
        following: [N] int64 index of the block a request meets next.
    """

    def __init__(self, blocks: Mapping[str, Blocks]) -> None:
        confidence = np.concatenate([entry.confidence for entry in blocks.values()]).astype(np.float64)
        clipped = np.clip(confidence, _SMALLEST, 1 - _SMALLEST)
        self.logits: FloatArray = np.log(clipped / (1 - clipped)).astype(np.float32)
        self.accepted: IntArray = np.concatenate([entry.accepted for entry in blocks.values()])
        self.following: IntArray = np.arange(1, len(self.accepted) + 1, dtype=np.int64)
        self._range: dict[str, tuple[int, int]] = {}
        start = 0
        for domain, entry in blocks.items():
            self._range[domain] = (start, len(entry))
            self.following[start + len(entry) - 1] = start
            start += len(entry)

    def place(self, domain: str, generator: np.random.Generator) -> int:
        """Return a random index of a domain's block."""
        start, size = self._range[domain]
        return start + int(generator.integers(size))

    def confidence(self, temperature: FloatArray | None, bias: FloatArray | None) -> FloatArray:
        """Return [N, gamma] confidences under a calibration; None leaves them as the head gives them."""
        return calibrated(self.logits, temperature, bias)


def calibrated(logits: FloatArray, temperature: FloatArray | None, bias: FloatArray | None) -> NDArray[np.float32]:
    """Return sigmoid(logits / temperature + bias), as the serving code's core does."""
    if temperature is not None and bias is not None:
        logits = logits / temperature + bias
    return np.asarray(0.5 * (1 + np.tanh(np.float32(0.5) * logits)), np.float32)
