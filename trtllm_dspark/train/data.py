"""Which blocks a step trains on: a function of seed and step alone, so that a resumed run draws the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_dspark.train.features import Captured
from trtllm_dspark.train.layers import Blocks
from trtllm_dspark.train.loss import Targets
from trtllm_dspark.train.responses import Response


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Size of a step and weights of the positions.

    Attributes:
        num_sequences: sequences of a step.
        anchors_per_sequence: blocks of each.
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
    """Draws the blocks of each step.

    Args:
        responses: all sequences.
        config: size of a step.
        num_shares: parts a step is divided into; its sum does not depend on who computes them.
    """

    def __init__(self, responses: Sequence[Response], config: BatchConfig, num_shares: int) -> None:
        self._responses, self._config, self._num_shares = responses, config, num_shares
        counts = np.array([response.num_anchors for response in responses], np.float64)
        # A sequence counts by its blocks, but not beyond what one step takes of it.
        self._probabilities = counts / counts.sum()
        self._num_sequences = min(config.num_sequences, int((counts > 0).sum()))

    def step(self, number: int) -> list[Share]:
        """Return the shares of step `number`."""
        config = self._config
        rng = np.random.default_rng([config.seed, number])
        chosen = rng.choice(len(self._responses), self._num_sequences, replace=False, p=self._probabilities)
        # Contexts of like length pad each other least.
        chosen = chosen[np.argsort([len(self._responses[index].token_ids) for index in chosen], kind="stable")]
        return [self._share(rng, part) for part in np.array_split(chosen, self._num_shares) if part.size]

    def _share(self, rng: np.random.Generator, indices: NDArray[np.int64]) -> Share:
        config = self._config
        gamma, width = config.block_size, config.anchors_per_sequence
        anchors = np.empty((len(indices), width), np.int64)
        real = np.zeros((len(indices), width), np.bool_)
        ends = np.empty(len(indices), np.int64)
        for row, index in enumerate(indices):
            response = self._responses[index]
            ends[row] = len(response.token_ids)
            count = min(width, response.num_anchors)
            places = np.sort(rng.choice(response.num_anchors, count, replace=False)) + response.response_start
            anchors[row] = places[-1]
            anchors[row, :count], real[row, :count] = places, True
        slots = np.arange(gamma)
        valid = real[..., None] & (anchors[..., None] + slots + 1 < ends[:, None, None])
        weights = np.where(valid, np.exp(-slots / config.decay), 0.0)
        if config.sample_positions:
            weights = (rng.random(valid.shape) < weights).astype(np.float64)
        rows = np.flatnonzero(weights) if config.sample_positions else np.arange(weights.size)
        return Share(indices, anchors, rows, weights.reshape(-1)[rows].astype(np.float32))


def collate(
    share: Share,
    responses: Sequence[Response],
    captured: Sequence[Captured],
    config: BatchConfig,
    draft_ids: NDArray[np.int64] | None,
    total_weight: float,
) -> tuple[Blocks, Targets]:
    """Turn a share into tensors.

    Args:
        share: what to train on.
        responses: all sequences.
        captured: of the share's sequences, in order.
        config: the step's.
        draft_ids: [V] draft id of each target id, -1 where the drafter has none; None where they are the same.
        total_weight: sum of the weights of the whole step.
    """
    gamma = config.block_size
    features, places_seen, index = _contexts(share, captured)
    first = np.array([responses[i].first_position for i in share.indices])
    sequence_of_token = np.repeat(np.arange(len(share.indices)), share.anchors.max(1))
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
        torch.from_numpy(features),
        torch.from_numpy(places_seen + first[sequence_of_token]),
        torch.from_numpy(index),
        torch.from_numpy(share.anchors + first[:, None]),
        torch.from_numpy(share.anchors),
        torch.from_numpy(following),
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


def _contexts(
    share: Share, captured: Sequence[Captured]
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Pack the contexts up to each sequence's last anchor."""
    lengths = share.anchors.max(1)
    features = np.concatenate(
        [
            one.features[:length].astype(np.float32) * one.scales[:length]
            for one, length in zip(captured, lengths, strict=True)
        ]
    )
    positions = np.concatenate([np.arange(length) for length in lengths])
    offsets = np.cumsum(lengths) - lengths
    index = offsets[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
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
    rest = np.maximum(1 - probs.sum(-1, keepdims=True), 0) ** power
    sharp = probs**power
    return np.asarray(sharp / (sharp.sum(-1, keepdims=True) + rest), np.float32)
