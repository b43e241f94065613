"""What verifying drafts would have gained, per request, from the blocks of past rounds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import FloatArray

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

    A request is a row of one array, so that a batch costs a few array operations: by threshold the shares of the verify
    lengths 0..gamma, and behind them the mean survivors.

    Args:
        max_draft_len: gamma.
    """

    def __init__(self, max_draft_len: int) -> None:
        self._gamma = max_draft_len
        self._one_hot = np.eye(max_draft_len + 1)
        self._rows: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._weight: list[float] = []
        self._sums: Reals = np.zeros((0, len(THRESHOLDS), max_draft_len + 2))
        self._pool: Reals = np.zeros((len(THRESHOLDS), max_draft_len + 2))
        self._pool_weight = 0.0

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
        return 0.0 if row is None else self._weight[row]

    def add(self, requests: Sequence[Hashable], survival: FloatArray) -> None:
        """Add one block of each request.

        Args:
            requests: different ones.
            survival: [R, gamma] float32, falling along a row.
        """
        if not requests:
            return
        rows = [self._row(request) for request in requests]
        lengths = (survival[:, None, :] >= THRESHOLDS[:, None]).sum(axis=2)
        sums = np.zeros((len(rows), self._gamma + 1))
        survival.cumsum(axis=1, out=sums[:, 1:])
        block = np.empty((len(rows), *self._pool.shape))
        block[:, :, :-1] = self._one_hot[lengths]
        block[:, :, -1] = sums[np.arange(len(rows))[:, None], lengths]
        self._pool *= POOL_MEMORY
        self._pool += block.mean(axis=0)
        self._pool_weight = POOL_MEMORY * self._pool_weight + 1.0
        block += MEMORY * self._sums[rows]
        self._sums[rows] = block
        for row in rows:
            self._weight[row] = MEMORY * self._weight[row] + 1.0

    def means(self, requests: Sequence[Hashable]) -> tuple[Reals, Reals]:
        """Return [R, C, gamma + 1] shares of verify lengths and [R, C] mean survivors by threshold; not while empty."""
        prior = self._pool * (PRIOR_BLOCKS / self._pool_weight)
        rows = [self._rows.get(request, -1) for request in requests]
        weight = np.array([0.0 if row < 0 else self._weight[row] for row in rows])
        if len(self._sums):
            # A request that is not known reads some row and takes nothing of it.
            known = np.array([row >= 0 for row in rows])
            own = np.where(known[:, None, None], self._sums[rows], 0.0)
        else:
            own = np.zeros((len(rows), *self._pool.shape))
        means = (own + prior) / (weight + PRIOR_BLOCKS)[:, None, None]
        return means[:, :, :-1], means[:, :, -1]

    def forget(self, request: Hashable) -> None:
        """Drop a request that has ended; what it showed stays in the mean of all."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._weight[row] = 0.0
            self._sums[row] = 0.0
            self._free.append(row)

    def _row(self, request: Hashable) -> int:
        row = self._rows.get(request)
        if row is None:
            if not self._free:
                before, more = len(self._weight), max(8, len(self._weight))
                self._weight += [0.0] * more
                self._sums = np.concatenate([self._sums, np.zeros((more, *self._pool.shape))])
                self._free += range(before + more - 1, before - 1, -1)
            row = self._rows[request] = self._free.pop()
        return row
