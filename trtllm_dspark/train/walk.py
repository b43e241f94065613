"""Accepted length on sequences of the target, without decoding: follow the sequence block by block.

A greedy sequence is what greedy speculation emits, so walking along it with the drafter's greedy drafts gives the
accepted length that decoding would have, exactly (for a target of the same weights).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.train import autoregressive
from trtllm_dspark.train.data import BatchConfig, Share, collate
from trtllm_dspark.train.features import Captured
from trtllm_dspark.train.layers import Blocks, Frozen, Parameters
from trtllm_dspark.train.model import backbone, head_step, markov_rows
from trtllm_dspark.train.responses import Response


@torch.no_grad()
def accepted_len(
    parameters: Parameters,
    frozen: Frozen,
    config: DrafterConfig,
    responses: Sequence[Response],
    captured: Sequence[Captured],
    draft_token_ids: NDArray[np.int64] | None,
) -> tuple[int, int]:
    """Return tokens emitted and verify rounds of greedy walks along the responses.

    A last round that the sequence's end cuts off is not counted.
    """
    emitted = rounds = 0
    batch = BatchConfig(1, 0, config.block_size, config.mask_token_id, 1.0, False)
    for response, one in zip(responses, captured, strict=True):
        count = response.num_anchors
        if count < 1:
            continue
        anchors = np.arange(count)[None] + response.response_start
        rows = np.arange(count * config.block_size)
        share = Share(np.array([0]), anchors, rows, np.ones(len(rows), np.float32))
        blocks, _ = collate(share, [response], [one], batch, None, 1.0)
        drafts = _greedy(parameters, frozen, config, blocks, draft_token_ids)
        moved, turns = _walk(drafts, np.asarray(response.token_ids[response.response_start :]))
        emitted, rounds = emitted + moved, rounds + turns
    return emitted, rounds


def _greedy(
    parameters: Parameters,
    frozen: Frozen,
    config: DrafterConfig,
    blocks: Blocks,
    draft_token_ids: NDArray[np.int64] | None,
) -> NDArray[np.int64]:
    """Return the drafts [anchors, gamma] of one sequence's blocks as target ids."""
    to_target = None if draft_token_ids is None else torch.from_numpy(draft_token_ids)
    anchors = blocks.input_ids[0, :, 0]
    if config.autoregressive:
        return _unrolled(parameters, frozen, config, blocks, to_target)
    hidden = backbone(parameters, frozen, config, blocks)
    logits = F.linear(hidden, frozen.head).view(len(anchors), config.block_size, -1)
    previous, drafts = anchors, []
    state: Tensor | None = None
    slots = hidden.view(len(anchors), config.block_size, -1)
    for slot in range(config.block_size):
        step = logits[:, slot]
        if config.markov_head != "none":
            rows, state = head_step(parameters, config, slots[:, slot], markov_rows(parameters, previous), state)
            step = step + rows @ parameters["markov.w2.weight"].t()
        chosen = step.argmax(-1)
        previous = chosen if to_target is None else to_target[chosen]
        drafts.append(previous)
    return torch.stack(drafts, 1).numpy()


def _unrolled(
    parameters: Parameters, frozen: Frozen, config: DrafterConfig, blocks: Blocks, to_target: Tensor | None
) -> NDArray[np.int64]:
    def choose(_: int, hidden: Tensor) -> Tensor:
        chosen = F.linear(hidden, frozen.head).argmax(-1)
        return chosen if to_target is None else to_target[chosen]

    hidden = autoregressive.unroll(parameters, frozen, config, blocks, choose)
    return choose(0, hidden).view(-1, config.block_size).numpy()


def _walk(drafts: NDArray[np.int64], tokens: NDArray[np.int64]) -> tuple[int, int]:
    """Follow one response: `drafts[i]` are proposed when token i is the anchor."""
    place = emitted = rounds = 0
    gamma = drafts.shape[1]
    while place + gamma < len(tokens):
        right = drafts[place] == tokens[place + 1 : place + 1 + gamma]
        accepted = gamma if right.all() else int(right.argmin())
        place += accepted + 1
        emitted += accepted + 1
        rounds += 1
    return emitted, rounds
