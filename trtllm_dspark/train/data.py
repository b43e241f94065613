"""Which blocks a step trains on: a function of seed and step alone, so that a resumed run draws the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_dspark.train.features import Captured
from trtllm_dspark.train.layers import Blocks
from trtllm_dspark.train.loss import Targets
from trtllm_dspark.train.responses import Response

_ROWS, _ORDER, _ANCHORS = range(3)
"""What a generator is seeded for, besides the run's seed: no two draw the same numbers."""
BFLOAT16_ROWS = 64
"""Numbers of rows are rounded up to multiples of it, with rows that nothing reads or that weigh 0: a product in
bfloat16 is compiled for each shape it has not had yet, which takes longer than the product."""
_SHARP = 0.5
"""Below this temperature, powers of all of a row's probabilities may be too small for float32."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Size of a step and weights of the positions.

    Attributes:
        num_sequences: visits of sequences in a step.
        anchors_per_sequence: blocks of each at most.
        block_size: gamma.
        mask_token_id: fills a block behind its anchor.
        decay: position k (from 1) weighs exp(-(k - 1) / decay).
        sample_positions: draw each position with that probability and weight 1 instead of weighing all: the same
            expectation, and the last layer and the head run for drawn positions only.
        target_temperature: of the distribution that L1 and the confidence head learn; 1 = the target's own. Lower ones
            put the drafter's effort where a greedy target looks.
        seed: decides every draw.
    """

    num_sequences: int
    anchors_per_sequence: int
    block_size: int
    mask_token_id: int
    decay: float
    sample_positions: bool
    target_temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """Sequences of a step that one pass works on.

    Attributes:
        indices: [S] of the responses.
        anchors: [S, A] indices into the sequences' tokens.
        rows: [n] wanted slots of the flattened S A gamma.
        weights: [n].
    """

    indices: NDArray[np.int64]
    anchors: NDArray[np.int64]
    rows: NDArray[np.int64]
    weights: NDArray[np.float32]


class Sampler:
    """Draws the blocks of each step: all of them once before any comes again.

    A sequence is visited as often as its anchors fill a row; a round of visits (an epoch) is shuffled, and each visit
    takes its own part of the sequence's anchors.

    Args:
        responses: all sequences.
        config: size of a step.
        num_shares: parts a step is divided into; its sum does not depend on who computes them.
    """

    def __init__(self, responses: Sequence[Response], config: BatchConfig, num_shares: int) -> None:
        self._responses, self._config, self._num_shares = responses, config, num_shares
        counts = np.array([response.num_anchors for response in responses], np.int64)
        self._num_parts = -(-counts // config.anchors_per_sequence)
        self._visits = np.repeat(np.arange(len(responses)), self._num_parts)
        self._part_of_visit = np.arange(len(self._visits)) - np.repeat(
            np.cumsum(self._num_parts) - self._num_parts, self._num_parts
        )
        self._num_sequences = min(config.num_sequences, len(self._visits))
        self._shuffled: tuple[int, NDArray[np.int64]] | None = None

    def step(self, number: int) -> list[Share]:
        """Return the shares of step `number`, counted from 1."""
        rng = np.random.default_rng([self._config.seed, _ROWS, number])
        places = np.arange((number - 1) * self._num_sequences, number * self._num_sequences)
        visits = [self._visit(int(place)) for place in places]
        # Contexts of like length pad each other least.
        visits.sort(key=lambda visit: len(self._responses[visit[0]].token_ids))
        parts = np.array_split(np.arange(len(visits)), self._num_shares)
        return [self._share(rng, [visits[i] for i in part]) for part in parts if part.size]

    def _visit(self, place: int) -> tuple[int, NDArray[np.int64]]:
        """Return the sequence of a visit and its anchors, ascending."""
        seed, (epoch, offset) = self._config.seed, divmod(place, len(self._visits))
        visit = self._order(epoch)[offset]
        index, part = int(self._visits[visit]), int(self._part_of_visit[visit])
        response = self._responses[index]
        shuffled = np.random.default_rng([seed, _ANCHORS, epoch, index]).permutation(response.num_anchors)
        anchors = np.array_split(shuffled, self._num_parts[index])[part]
        return index, np.sort(anchors) + response.response_start

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffled is None or self._shuffled[0] != epoch:
            rng = np.random.default_rng([self._config.seed, _ORDER, epoch])
            self._shuffled = (epoch, rng.permutation(len(self._visits)))
        return self._shuffled[1]

    def _share(self, rng: np.random.Generator, visits: Sequence[tuple[int, NDArray[np.int64]]]) -> Share:
        config = self._config
        gamma, width = config.block_size, config.anchors_per_sequence
        anchors = np.empty((len(visits), width), np.int64)
        real = np.zeros((len(visits), width), np.bool_)
        ends = np.empty(len(visits), np.int64)
        for row, (index, places) in enumerate(visits):
            ends[row] = len(self._responses[index].token_ids)
            anchors[row] = places[-1]
            anchors[row, : len(places)], real[row, : len(places)] = places, True
        slots = np.arange(gamma)
        valid = real[..., None] & (anchors[..., None] + slots + 1 < ends[:, None, None])
        weights = np.where(valid, np.exp(-slots / config.decay), 0.0)
        if config.sample_positions:
            weights = (rng.random(valid.shape) < weights).astype(np.float64)
        rows = np.flatnonzero(weights) if config.sample_positions else np.arange(weights.size)
        indices = np.array([index for index, _ in visits], np.int64)
        return Share(indices, anchors, rows, weights.reshape(-1)[rows].astype(np.float32))


def collate(
    share: Share,
    responses: Sequence[Response],
    captured: Sequence[Captured],
    config: BatchConfig,
    draft_ids: NDArray[np.int64] | None,
    total_weight: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Blocks, Targets]:
    """Turn a share into tensors.

    Args:
        share: what to train on.
        responses: all sequences.
        captured: of the share's sequences, in order.
        config: the step's.
        draft_ids: [V] draft id of each target id, -1 where the drafter has none; None where they are the same.
        total_weight: sum of the weights of the whole step.
        dtype: of the features, and of the products that `Blocks` are for.
    """
    gamma, multiple = config.block_size, BFLOAT16_ROWS if dtype == torch.bfloat16 else 1
    share = _filled(share, multiple, gamma)
    features, places_seen, index = _contexts(share, captured, multiple, gamma, dtype)
    first = np.array([responses[i].first_position for i in share.indices])
    sequence_of_token = np.repeat(np.arange(len(share.indices)), share.anchors.max(1))
    positions, filled = places_seen + first[sequence_of_token], len(features) - len(places_seen)
    tokens = [np.asarray(responses[i].token_ids, np.int64) for i in share.indices]
    following = np.concatenate([ids[1 : end + 1] for ids, end in zip(tokens, share.anchors.max(1), strict=True)])
    starts = np.array([responses[i].response_start for i in share.indices])
    places = share.anchors[..., None] + np.arange(gamma + 1)
    sequence = np.stack([ids[np.minimum(place, len(ids) - 1)] for ids, place in zip(tokens, places, strict=True)])
    ids = np.full((*share.anchors.shape, gamma), config.mask_token_id, np.int64)
    ids[..., 0] = sequence[..., 0]
    block, slot = np.divmod(share.rows, gamma)
    row_sequence = block // share.anchors.shape[1]
    # Row t of the targets predicts token response_start + t: the one after the slot's own position.
    target_rows = share.anchors.reshape(-1)[block] + slot + 1 - starts[row_sequence]
    top_ids, top_probs = _tops(captured, row_sequence, target_rows)
    top_probs = _sharpen(top_probs, config.target_temperature)
    labels = sequence[..., 1:].reshape(-1)[share.rows]
    if draft_ids is not None:
        top_ids, labels = draft_ids[top_ids], draft_ids[labels]
        known = top_ids >= 0
        top_ids, top_probs = np.where(known, top_ids, 0), np.where(known, top_probs, 0)
    blocks = Blocks(
        features,
        torch.from_numpy(np.pad(positions, (0, filled))),
        torch.from_numpy(index),
        torch.from_numpy(share.anchors + first[:, None]),
        torch.from_numpy(share.anchors),
        torch.from_numpy(np.pad(following, (0, filled))),
        torch.from_numpy(ids),
        torch.from_numpy(np.ascontiguousarray(sequence[..., :-1])),
        torch.from_numpy(share.rows),
    )
    targets = Targets(
        torch.from_numpy(top_ids),
        torch.from_numpy(top_probs),
        torch.from_numpy(labels),
        torch.from_numpy(share.weights),
        torch.from_numpy(slot),
        total_weight,
    )
    return blocks, targets


def _filled(share: Share, multiple: int, gamma: int) -> Share:
    """Round the number of wanted rows up; where all slots are wanted it is the same in every step."""
    count, num_slots = len(share.rows), share.anchors.size * gamma
    extra = min(-(-count // multiple) * multiple, num_slots - 1) - count
    if not count or extra <= 0:
        return share
    rows = np.append(share.rows, np.repeat(share.rows[-1:], extra))
    return replace(share, rows=rows, weights=np.append(share.weights, np.zeros(extra, np.float32)))


def _contexts(
    share: Share, captured: Sequence[Captured], multiple: int, gamma: int, dtype: torch.dtype
) -> tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Pack the contexts up to each sequence's last anchor; rows behind them are zeros."""
    lengths = share.anchors.max(1)
    ends = np.cumsum(lengths)
    features = torch.empty(-(-int(ends[-1]) // multiple) * multiple, captured[0].features.shape[1], dtype=dtype)
    features[ends[-1] :] = 0
    for one, end, length in zip(captured, ends, lengths, strict=True):
        half = torch.from_numpy(one.features[:length])
        features[end - length : end] = half.float().mul_(torch.from_numpy(one.scales[:length]))
    positions = np.concatenate([np.arange(length) for length in lengths])
    # Attention works on rows of a context and a block's own slots.
    longest = -(-(lengths.max() + gamma) // multiple) * multiple - gamma if multiple > 1 else lengths.max()
    index = (ends - lengths)[:, None] + np.minimum(np.arange(longest), lengths[:, None] - 1)
    return features, positions, index


def _tops(
    captured: Sequence[Captured], sequences: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Gather rows of the sequences' targets; a row behind the end (of weight 0) repeats the last one."""
    width = max(one.top_ids.shape[1] for one in captured)
    ids, probs = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.float32)
    for number, one in enumerate(captured):
        mine = sequences == number
        at = np.minimum(rows[mine], len(one.top_ids) - 1)
        known = one.top_ids.shape[1]
        ids[mine, :known], probs[mine, :known] = one.top_ids[at], one.top_probs[at]
    return ids, probs


def _sharpen(probs: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """Apply a temperature to [n, K] probabilities; what they leave over counts as one more token."""
    if temperature == 1.0:
        return probs
    power = np.float32(1 / temperature)
    rest = np.maximum(1 - probs.sum(-1, keepdims=True), 0)
    if temperature < _SHARP:
        largest = np.maximum(probs.max(-1, keepdims=True), rest)
        probs, rest = probs / largest, rest / largest
    rest, sharp = rest**power, probs**power
    return np.asarray(sharp / (sharp.sum(-1, keepdims=True) + rest), np.float32)
