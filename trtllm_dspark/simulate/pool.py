"""The blocks of all domains in one array, and every request's place in it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core
from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.simulate.blocks import Blocks

_SMALLEST = 1e-7


class BlockPool:
    """Blocks by domain; a request meets one after the other, and the first again after the last.

    Attributes:
        by_token: whether there is a block for every token of a text (`Blocks`).
        logits: [N, gamma] float32 of the confidence head, without calibration.
        accepted: [N] int64 drafts accepted of a block that is verified in full.
        following: [N] int64 index of the block behind each.

    Raises:
        ConfigError: blocks of some domains are one for every token and of others not.
    """

    def __init__(self, blocks: Mapping[str, Blocks]) -> None:
        self.by_token = all(entry.starts is not None for entry in blocks.values())
        if not self.by_token and any(entry.starts is not None for entry in blocks.values()):
            raise ConfigError(
                "an acceptance profile has blocks of every token in some domains only; record all of them again"
            )
        self._starts: dict[str, tuple[int, ...]] = {}
        if self.by_token:
            # A round goes on by up to gamma + 1 blocks: behind the last of a domain stand its first ones again.
            blocks = {domain: _padded(entry) for domain, entry in blocks.items()}
        confidence = np.concatenate([entry.confidence for entry in blocks.values()]).astype(np.float64)
        clipped = np.clip(confidence, _SMALLEST, 1 - _SMALLEST)
        self.logits: FloatArray = np.log(clipped / (1 - clipped)).astype(np.float32)
        self.accepted: IntArray = np.concatenate([entry.accepted for entry in blocks.values()])
        self.following: IntArray = np.arange(1, len(self.accepted) + 1, dtype=np.int64)
        self._range: dict[str, tuple[int, int]] = {}
        start = 0
        for domain, entry in blocks.items():
            self._range[domain] = (start, len(entry))
            if entry.starts is None:
                self.following[start + len(entry) - 1] = start
            else:
                padding = entry.confidence.shape[1] + 1
                size = len(entry) - padding
                self._starts[domain] = tuple(start + first for first in entry.starts)
                self.following[start : start + len(entry)] = start + np.arange(1, len(entry) + 1) % size
            start += len(entry)

    def place(self, domain: str, generator: np.random.Generator) -> int:
        """Return a random index of a domain's block, where there is one for every token the first of a text."""
        if self.by_token:
            starts = self._starts[domain]
            return starts[int(generator.integers(len(starts)))]
        start, size = self._range[domain]
        return start + int(generator.integers(size))

    def rows(self, *, most_waiting: int = 1) -> _core.SimulatedRows:
        """Return rows of requests that meet these blocks; there are none yet.

        Args:
            most_waiting: tokens of a request that wait to be absorbed while it does not draft; 1 = none do.
        """
        return _core.SimulatedRows(self.accepted, self.following, by_token=self.by_token, most_waiting=most_waiting)

    def confidence(self, temperature: FloatArray | None, bias: FloatArray | None) -> FloatArray:
        """Return [N, gamma] confidences under a calibration; None leaves them as the head gives them."""
        return calibrated(self.logits, temperature, bias)


def _padded(entry: Blocks) -> Blocks:
    wrapped = np.arange(len(entry) + entry.confidence.shape[1] + 1) % len(entry)
    return Blocks(entry.confidence[wrapped], entry.accepted[wrapped], entry.starts)


def calibrated(logits: FloatArray, temperature: FloatArray | None, bias: FloatArray | None) -> NDArray[np.float32]:
    """Return sigmoid(logits / temperature + bias), as the serving code's core does."""
    if temperature is not None and bias is not None:
        logits = logits / temperature + bias
    return np.asarray(0.5 * (1 + np.tanh(np.float32(0.5) * logits)), np.float32)
