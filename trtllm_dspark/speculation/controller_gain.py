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
PRIOR_BLOCKS = 4.0
"""Blocks that what is known of all requests counts for in a new one; they fade as its own blocks come in."""
RATIO_MEMORY = 0.98
"""Weight of a block's outcome after one more block of its request was verified."""
RATIO_PRIOR = 1.0
"""Drafts that count as right as promised before outcomes say otherwise."""
POOL_DRAFTS = 2.0
"""Drafts that the outcomes of all requests count for in a new one; they fade likewise."""
MAX_RATIO = 1.5
HINDSIGHT_MEMORY = 0.95
"""Weight of what was expected of a block, and of what it held, after one more block of its request."""
HINDSIGHT_PRIOR = 6.0
"""Drafts a new request is taken to have expected."""
HINDSIGHT_FOUND = 0.9
"""Share of those that were found: the usual optimism of the best of several estimates."""
Reals = NDArray[np.float64]
_UNTESTED = np.array([0.0, 0.0, 1.0])
_UNSEEN = HINDSIGHT_PRIOR * np.array([1.0, 1.0, HINDSIGHT_FOUND, HINDSIGHT_FOUND])
_OUTCOME_MEMORY = np.array([RATIO_MEMORY, RATIO_MEMORY, MEMORY])


class BlockStatistics:
    """Means over past blocks, by request and threshold: how many drafts would be verified, how many survive.

    A request is a row of one array, so that a batch costs a few array operations: by threshold the shares of the verify
    lengths 0..gamma, and behind them the mean survivors. Beside it stands what its confidences promised and what of
    that was accepted. What others did enters only as long as little is known of the request itself.

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
        # By request: drafts promised, drafts accepted, and what is left of the weight of all requests' ratio.
        self._outcomes: Reals = np.zeros((0, 3))
        self._promised = self._kept = 0.0
        # By request: survivors and drafts to verify that were expected of its blocks, and those that they held.
        self._hindsight: Reals = np.zeros((0, 4))

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

    @property
    def accepted_ratio(self) -> float:
        """Drafts accepted over drafts promised by all requests, recently."""
        return min(MAX_RATIO, (self._kept + RATIO_PRIOR) / (self._promised + RATIO_PRIOR))

    def add(self, requests: Sequence[Hashable], survival: FloatArray, verify_len: IntArray, accepted: IntArray) -> None:
        """Add one block of each request.

        Args:
            requests: different ones.
            survival: [R, gamma] float32, falling along a row.
            verify_len: [R] int64 drafts verified.
            accepted: [R] int64 drafts accepted.
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
        promised = sums[np.arange(len(rows)), verify_len]
        self._promised = RATIO_MEMORY * self._promised + float(promised.sum())
        self._kept = RATIO_MEMORY * self._kept + float(accepted.sum())
        tested = np.array(rows)[verify_len > 0]
        self._outcomes[tested] *= _OUTCOME_MEMORY
        self._outcomes[tested, 0] += promised[verify_len > 0]
        self._outcomes[tested, 1] += accepted[verify_len > 0]

    def ratios(self, requests: Sequence[Hashable]) -> Reals:
        """Return [R] drafts accepted over drafts promised by each request, recently."""
        rows = [self._rows.get(request, -1) for request in requests]
        own = np.array([_UNTESTED if row < 0 else self._outcomes[row] for row in rows])
        pool = POOL_DRAFTS * own[:, 2]
        ratio = (own[:, 1] + RATIO_PRIOR + pool * self.accepted_ratio) / (own[:, 0] + RATIO_PRIOR + pool)
        return np.minimum(MAX_RATIO, ratio)

    def look_back(self, requests: Sequence[Hashable], survival: FloatArray, expected: Reals) -> None:
        """Compare the next block of each request with what was expected of it.

        The threshold of a request is the best of several estimates over a few blocks, so what is expected of it is too
        much on average, and most where it is acted upon. The next block was not among them: what it holds at the
        threshold that had been chosen before is what the choice is worth. Its confidences tell that; outcomes would
        only add their noise.

        Args:
            requests: N different ones.
            survival: [N, gamma] float32, falling along a row.
            expected: [N, 3] threshold, survivors and drafts to verify.
        """
        rows = [self._row(request) for request in requests]
        verified = survival >= expected[:, :1].astype(np.float32)
        held = np.stack([np.where(verified, survival, 0.0).sum(axis=1), verified.sum(axis=1)], axis=1)
        self._hindsight[rows] = HINDSIGHT_MEMORY * self._hindsight[rows] + np.concatenate(
            [expected[:, 1:], held], axis=1
        )

    def hindsight(self, requests: Sequence[Hashable]) -> Reals:
        """Return [R, 2] what is left of expected survivors and of expected drafts to verify, at most 1."""
        rows = [self._rows.get(request, -1) for request in requests]
        sums = np.array([_UNSEEN if row < 0 else self._hindsight[row] for row in rows])
        left: Reals = np.minimum(1.0, sums[:, 2:] / sums[:, :2])
        return left

    def means(self, requests: Sequence[Hashable]) -> tuple[Reals, Reals]:
        """Return [R, C, gamma + 1] shares of verify lengths and [R, C] mean survivors by threshold; not while empty."""
        prior = self._pool / self._pool_weight
        rows = [self._rows.get(request, -1) for request in requests]
        weight = np.array([0.0 if row < 0 else self._weight[row] for row in rows])
        if len(self._sums):
            # A request that is not known reads some row and takes nothing of it.
            known = np.array([row >= 0 for row in rows])
            own = np.where(known[:, None, None], self._sums[rows], 0.0)
        else:
            own = np.zeros((len(rows), *self._pool.shape))
        # What is left of the prior after as many own blocks as that weight.
        pool = PRIOR_BLOCKS * (1.0 - (1.0 - MEMORY) * weight)
        means = (own + pool[:, None, None] * prior) / (weight + pool)[:, None, None]
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
                self._outcomes = np.concatenate([self._outcomes, np.zeros((more, 3))])
                self._hindsight = np.concatenate([self._hindsight, np.zeros((more, 4))])
                self._free += range(before + more - 1, before - 1, -1)
            row = self._rows[request] = self._free.pop()
            self._outcomes[row] = _UNTESTED
            self._hindsight[row] = _UNSEEN
        return row
