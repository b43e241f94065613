"""What mode `adaptive` keeps about requests, by array operations over whole batches: the oracle of the core's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.speculation import bypass
from trtllm_dspark.speculation import controller_gain as rules
from trtllm_dspark.speculation.controller_gain import THRESHOLDS

Reals = NDArray[np.float64]
UNTESTED = np.array([0.0, 0.0, 1.0])
UNSEEN = rules.HINDSIGHT_PRIOR * np.array([1.0, 1.0, rules.HINDSIGHT_FOUND, rules.HINDSIGHT_FOUND])


class NumpyBlockStatistics:
    """As `_core.BlockStatistics`.

    By request and threshold: shares of the verify lengths 0..gamma and behind them the mean survivors; by request what
    its confidences promised, what of that was accepted, and what is left of the weight of all requests' ratio;
    survivors and drafts that were expected of its blocks, and those that they held; threshold, survivors and drafts
    that are expected of the next one.
    """

    def __init__(self, max_draft_len: int) -> None:
        self.gamma = max_draft_len
        shape = (len(THRESHOLDS), max_draft_len + 2)
        self.weight, self.sums = np.zeros(0), np.zeros((0, *shape))
        self.outcomes, self.past, self.expected = np.zeros((0, 3)), np.zeros((0, 4)), np.zeros((0, 3))
        self.pool, self.pool_weight = np.zeros(shape), 0.0
        self.promised = self.kept = 0.0

    @property
    def empty(self) -> bool:
        return self.pool_weight == 0.0

    @property
    def accepted_ratio(self) -> float:
        return min(rules.MAX_RATIO, (self.kept + rules.RATIO_PRIOR) / (self.promised + rules.RATIO_PRIOR))

    def reset(self, row: int) -> None:
        if row == len(self.weight):
            for name in ("weight", "sums", "outcomes", "past", "expected"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros((1, *array.shape[1:]))]))
        self.weight[row], self.sums[row] = 0.0, 0.0
        self.outcomes[row], self.past[row], self.expected[row] = UNTESTED, UNSEEN, np.nan

    def add(self, rows: IntArray, confidence: FloatArray, verify_len: IntArray, accepted: IntArray) -> None:
        survival = np.fmax(confidence, np.float32(0)).cumprod(axis=1)
        self._look_back(rows, survival)
        lengths = (survival[:, None, :] >= THRESHOLDS[:, None]).sum(axis=2)
        sums = np.zeros((len(rows), self.gamma + 1))
        survival.astype(np.float64).cumsum(axis=1, out=sums[:, 1:])
        block = np.empty((len(rows), *self.pool.shape))
        block[:, :, :-1] = np.eye(self.gamma + 1)[lengths]
        block[:, :, -1] = sums[np.arange(len(rows))[:, None], lengths]
        self.pool = rules.POOL_MEMORY * self.pool + block.mean(axis=0)
        self.pool_weight = rules.POOL_MEMORY * self.pool_weight + 1.0
        self.sums[rows] = block + rules.MEMORY * self.sums[rows]
        self.weight[rows] = rules.MEMORY * self.weight[rows] + 1.0
        promised = sums[np.arange(len(rows)), verify_len]
        self.promised = rules.RATIO_MEMORY * self.promised + float(promised.sum())
        self.kept = rules.RATIO_MEMORY * self.kept + float(accepted.sum())
        tested = rows[verify_len > 0]
        self.outcomes[tested] *= np.array([rules.RATIO_MEMORY, rules.RATIO_MEMORY, rules.MEMORY])
        self.outcomes[tested, 0] += promised[verify_len > 0]
        self.outcomes[tested, 1] += accepted[verify_len > 0]

    def evaluate(
        self, rows: IntArray, caps: IntArray, verify_us: FloatArray, draft_us: float
    ) -> tuple[Reals, float, float]:
        count, every = len(rows), np.arange(len(rows))
        curve = verify_us.astype(np.float64)
        plain_us = curve[count]
        added = (curve[count::count] - plain_us) / count
        shares, survivors = self._means(rows)
        tokens = 1.0 + self._ratios(rows)[:, None] * survivors
        lengths = weighted(shares, np.arange(self.gamma + 1.0))
        together = (np.interp(count * (1.0 + lengths), np.arange(len(curve)), curve) - plain_us) / count
        more_us = weighted(shares, added) / count + together * (1.0 - 1.0 / count)
        least_us = (draft_us + plain_us) / count
        rates = tokens / (least_us + more_us)
        # Of rates that are equal but for rounding the one that verifies least.
        best = np.full(len(rates), rates.shape[1] - 1)
        for threshold in reversed(range(rates.shape[1] - 1)):
            best = np.where(rates[:, threshold] > rates[every, best] * (1.0 + 1e-9), threshold, best)
        chosen = THRESHOLDS[best].astype(np.float64)
        self.expected[rows] = np.stack([chosen, survivors[every, best], lengths[every, best]], axis=1)
        past = self.past[rows]
        left = np.minimum(1.0, past[:, 2:] / past[:, :2])
        tokens_left = 1.0 + left[:, 0] * (tokens[every, best] - 1.0)
        gains = tokens_left / (least_us + left[:, 1] * more_us[every, best]) * plain_us / count - 1.0
        able = caps > 0
        worth = np.stack([gains, tokens_left - 1.0, left[:, 1] * more_us[every, best]])
        return worth, float(gains[able].mean()), float(np.minimum(chosen[able], 1.0).mean())

    def thresholds(self, rows: IntArray, unknown: float) -> FloatArray:
        found = np.array([np.nan if row < 0 else self.expected[row, 0] for row in rows])
        return np.where(np.isnan(found), unknown, found).astype(np.float32)

    def verify_lens(
        self, rows: IntArray, caps: IntArray, confidence: FloatArray, *, budget: int, unknown: float, probed: int = -1
    ) -> IntArray:
        wanted = self.thresholds(rows, unknown)
        chance = np.clip(np.nan_to_num(confidence), 0, 1) * (np.arange(self.gamma) < caps[:, None])
        survival = chance.astype(np.float32).cumprod(axis=1)
        verified = np.logical_and.accumulate((survival >= wanted[:, None]) & (survival > 0), axis=1)
        # First drafts first, among them those of the first requests.
        in_order = verified.T.ravel()
        in_order &= in_order.cumsum() <= budget
        lengths: IntArray = in_order.reshape(self.gamma, len(rows)).sum(axis=0)
        tested = np.maximum(lengths, (rows == probed) & (rows >= 0) & (caps > 0))
        return tested if tested.sum() <= budget else lengths

    def blocks(self, rows: IntArray) -> Reals:
        return np.asarray(self.weight[rows])

    def _look_back(self, rows: IntArray, survival: FloatArray) -> None:
        known = ~np.isnan(self.expected[rows, 0])
        rows, survival = rows[known], survival[known]
        verified = survival >= self.expected[rows, :1].astype(np.float32)
        survivors = np.where(verified, survival, np.float32(0)).sum(axis=1, dtype=np.float64)
        held = np.stack([survivors, verified.sum(axis=1)], axis=1)
        found = np.concatenate([self.expected[rows, 1:], held], axis=1)
        self.past[rows] = rules.HINDSIGHT_MEMORY * self.past[rows] + found

    def _ratios(self, rows: IntArray) -> Reals:
        own = self.outcomes[rows]
        pool = rules.POOL_DRAFTS * own[:, 2]
        ratio = (own[:, 1] + rules.RATIO_PRIOR + pool * self.accepted_ratio) / (own[:, 0] + rules.RATIO_PRIOR + pool)
        return np.minimum(rules.MAX_RATIO, ratio)

    def _means(self, rows: IntArray) -> tuple[Reals, Reals]:
        """Return [R, C, gamma + 1] shares of verify lengths and [R, C] mean survivors."""
        weight = self.weight[rows]
        pool = rules.PRIOR_BLOCKS * (1.0 - (1.0 - rules.MEMORY) * weight)
        prior = self.pool / self.pool_weight
        means = (self.sums[rows] + pool[:, None, None] * prior) / (weight + pool)[:, None, None]
        return means[:, :, :-1], means[:, :, -1]


def weighted(shares: Reals, values: Reals) -> Reals:
    """Return the sum over the last axis in its order: equal shares give equal sums, which a BLAS does not promise."""
    total = np.zeros(shares.shape[:-1])
    for step, value in enumerate(values):
        total += shares[..., step] * value
    return total


@dataclass
class Standing:
    known: bool = False
    resting: bool = False
    mean: float | None = None
    poor: int = 0


class PlainStandings:
    """As `_core.Standings`, one request after the other."""

    def __init__(self) -> None:
        self.rows: list[Standing] = []

    def reset(self, row: int) -> None:
        self.rows[row : row + 1] = [Standing()]

    def meet(self, rows: IntArray) -> None:
        for row in rows:
            self.rows[row].known = True

    def judge(self, rows: IntArray, caps: IntArray, gains: Reals, blocks: Reals) -> tuple[IntArray, int, bool, bool]:
        able = np.flatnonzero(caps).tolist()
        entered = [self._judge(self.rows[rows[place]], gains[place], blocks[place]) for place in able]
        resting = [place for place in able if self.rows[rows[place]].resting]
        fresh = any(blocks[place] == 0 and gains[place] > bypass.HEAVY_LOSS for place in resting)
        return np.array(resting, np.int64), len(able), any(entered), fresh

    def _judge(self, standing: Standing, gain: float, known: float) -> bool:
        """Return whether a request that speculated rests now."""
        if not standing.known:
            standing.known, standing.resting = True, gain < bypass.ENTER_GAIN
        elif standing.resting:
            if gain > bypass.LEAVE_GAIN:
                standing.resting, standing.mean, standing.poor = False, None, 0
        elif known:
            mean = gain if standing.mean is None else standing.mean
            standing.mean = mean + bypass.SMOOTHING * (gain - mean)
            if gain < bypass.HEAVY_LOSS:
                standing.poor += bypass.HEAVY_WEIGHT
            else:
                standing.poor = standing.poor + 1 if standing.mean < bypass.ENTER_GAIN else 0
            standing.resting = standing.poor >= bypass.PATIENCE
            return standing.resting
        return False
