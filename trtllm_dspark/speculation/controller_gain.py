"""What verifying drafts would have gained, per request, from the blocks of past rounds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import FloatArray, IntArray

THRESHOLDS = np.array(
    [0.03, 0.06, 0.09, 0.12, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 2.0], np.float32
)
"""Least survivals a request may ask of a draft; no draft reaches the last. Throughput is flat around its best."""
MEMORY = 0.9
"""Weight of a block after one more of its request: what is known of a request rests on its last ten blocks."""
POOL_MEMORY = 0.98
PRIOR_BLOCKS = 2.0
"""Blocks that what is known of all requests counts for in what is known of one."""
Reals = NDArray[np.float64]


class BlockStatistics:
    """Means over past blocks, by request and threshold: how many drafts would be verified, how many survive.

    Attributes are rows of arrays, so that a batch costs a few array operations.

    Args:
        max_draft_len: gamma.
    """

    def __init__(self, max_draft_len: int) -> None:
        self._gamma = max_draft_len
        self._rows: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._weight: Reals = np.zeros(0)
        self._lengths: Reals = np.zeros((0, len(THRESHOLDS), max_draft_len + 1))
        self._survivors: Reals = np.zeros((0, len(THRESHOLDS)))
        self._pool_weight = 0.0
        self._pool_lengths: Reals = np.zeros((len(THRESHOLDS), max_draft_len + 1))
        self._pool_survivors: Reals = np.zeros(len(THRESHOLDS))

    @property
    def empty(self) -> bool:
        """Whether no block was seen yet."""
        return self._pool_weight == 0.0

    def __len__(self) -> int:
        """Return the number of requests that are known."""
        return len(self._rows)

    def blocks(self, request: Hashable) -> float:
        """Return how many blocks of a request count, old ones less."""
        row = self._rows.get(request)
        return 0.0 if row is None else float(self._weight[row])

    def add(self, requests: Sequence[Hashable], survival: FloatArray) -> None:
        """Add one block of each request.

        Args:
            requests: different ones.
            survival: [R, gamma] float32, falling along a row.
        """
        count = len(requests)
        if count == 0:
            return
        rows = np.array([self._row(request) for request in requests], np.int64)
        lengths: IntArray = (survival[:, None, :] >= THRESHOLDS[:, None]).sum(axis=2)
        sums = np.zeros((count, self._gamma + 1))
        np.cumsum(survival, axis=1, out=sums[:, 1:])
        survivors = np.take_along_axis(sums, lengths, axis=1)
        one_hot = lengths[:, :, None] == np.arange(self._gamma + 1)
        self._weight[rows] = MEMORY * self._weight[rows] + 1.0
        self._lengths[rows] = MEMORY * self._lengths[rows] + one_hot
        self._survivors[rows] = MEMORY * self._survivors[rows] + survivors
        share = 1.0 / count
        self._pool_weight = POOL_MEMORY * self._pool_weight + 1.0
        self._pool_lengths = POOL_MEMORY * self._pool_lengths + share * one_hot.sum(axis=0)
        self._pool_survivors = POOL_MEMORY * self._pool_survivors + share * survivors.sum(axis=0)

    def means(self, requests: Sequence[Hashable]) -> tuple[Reals, Reals]:
        """Return [R, C, gamma + 1] shares of verify lengths and [R, C] mean survivors by threshold; not while empty."""
        rows = np.array([self._rows.get(request, -1) for request in requests], np.int64)
        known = rows >= 0
        weight = np.where(known, self._weight[rows], 0.0) if len(self._weight) else np.zeros(len(rows))
        lengths = np.broadcast_to(self._pool_lengths / self._pool_weight, (len(rows), *self._pool_lengths.shape))
        survivors = np.broadcast_to(self._pool_survivors / self._pool_weight, (len(rows), len(THRESHOLDS)))
        if not known.any():
            return lengths, survivors
        total = weight + PRIOR_BLOCKS
        own = np.where(known, rows, 0)
        mine = known[:, None]
        lengths = (np.where(mine[..., None], self._lengths[own], 0.0) + PRIOR_BLOCKS * lengths) / total[:, None, None]
        survivors = (np.where(mine, self._survivors[own], 0.0) + PRIOR_BLOCKS * survivors) / total[:, None]
        return lengths, survivors

    def forget(self, request: Hashable) -> None:
        """Drop a request that has ended; what it showed stays in the mean of all."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._weight[row] = 0.0
            self._lengths[row] = 0.0
            self._survivors[row] = 0.0
            self._free.append(row)

    def _row(self, request: Hashable) -> int:
        row = self._rows.get(request)
        if row is None:
            if not self._free:
                self._grow()
            row = self._rows[request] = self._free.pop()
        return row

    def _grow(self) -> None:
        before, more = len(self._weight), max(8, len(self._weight))
        self._weight = np.concatenate([self._weight, np.zeros(more)])
        self._lengths = np.concatenate([self._lengths, np.zeros((more, *self._lengths.shape[1:]))])
        self._survivors = np.concatenate([self._survivors, np.zeros((more, len(THRESHOLDS)))])
        self._free += range(before + more - 1, before - 1, -1)
