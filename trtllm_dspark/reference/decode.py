"""Speculative decoding of one request, the whole round on one page; every pass is recomputed from position 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.reference._layers import Arrays
from trtllm_dspark.reference.acceptance import accept_rejection
from trtllm_dspark.reference.chain import draft_chain
from trtllm_dspark.reference.heads import confidence, heads_from_arrays
from trtllm_dspark.reference.models import drafter_block, drafter_context, target_forward
from trtllm_dspark.reference.sampling import invert, token_law
from trtllm_dspark.reference.schedule import Number, survivals

ChooseLength = Callable[[Sequence[Number]], int]
"""Chooses verify_len from the survivals of the block; must be causal (see docs/losslessness.md)."""


class Target(NamedTuple):
    """A target model."""

    config: ModelConfig
    arrays: Arrays


class Drafter(NamedTuple):
    """A drafter for some target."""

    config: DrafterConfig
    arrays: Arrays


class Round(NamedTuple):
    """What one round did: its drafts, their confidences, how many were verified, and the tokens it emitted."""

    drafts: list[int]
    confidence: list[float]
    verify_len: int
    emitted: list[int]


def decode(target: Target, prompt: Sequence[int], num_tokens: int, *, temperature: float, seed: int) -> list[int]:
    """Generate without speculation: one target pass a token."""
    rng, tokens = np.random.default_rng(seed), list(prompt)
    for _ in range(num_tokens):
        logits = target_forward(target.config, target.arrays, tokens).logits
        tokens.append(invert(token_law(logits[-1], temperature), rng.random()))
    return tokens[len(prompt) :]


def speculative_decode(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    choose_length: ChooseLength,
    temperature: float,
    seed: int,
) -> tuple[list[int], list[Round]]:
    """Generate `num_tokens` tokens with rejection acceptance; temperature 0 makes it greedy, token for token.

    Args:
        target: the model whose law the output follows.
        drafter: proposes blocks of `block_size` tokens from the target's features.
        prompt: token ids, at least one.
        num_tokens: tokens to return; the last round may produce more, which are dropped.
        choose_length: verify_len of a block from its survivals.
        temperature: of target and drafter; below 1e-5 both take the best token.
        seed: of the random numbers.

    Returns:
        The tokens and a record of every round.

    Source: DSpark paper, sections 3.1-3.2; loop as in DeepSpec.
    """
    rng, tokens, rounds = np.random.default_rng(seed), list(prompt), list[Round]()
    heads = heads_from_arrays(drafter.config, drafter.arrays)
    vocab_size, layer_ids = target.config.vocab_size, drafter.config.target_layer_ids

    verified = target_forward(target.config, target.arrays, tokens, feature_layer_ids=layer_ids)
    tokens.append(invert(token_law(verified.logits[-1], temperature), rng.random()))
    while len(tokens) < len(prompt) + num_tokens:
        anchor, position = tokens[-1], len(tokens) - 1
        # The drafter knows the target's features of every token before the anchor, and the anchor itself only by id.
        context = drafter_context(drafter.config, drafter.arrays, verified.features[:position])
        block = drafter_block(
            drafter.config, drafter.arrays, context, anchor, target_arrays=target.arrays, draft_token_ids=heads.d2t
        )
        draft = draft_chain(
            heads, block.base_logits, anchor, lambda law, _: invert(law, rng.random()), vocab_size,
            hidden=block.hidden, temperature=temperature,
        )  # fmt: skip
        chances = confidence(heads, block.hidden, anchor, draft.tokens)
        verify_len = choose_length(survivals(chances.tolist()))

        drafts = draft.tokens[:verify_len].tolist()
        verified = target_forward(target.config, target.arrays, [*tokens, *drafts], feature_layer_ids=layer_ids)
        laws = [token_law(row, temperature) for row in verified.logits[position:]]
        uniforms = rng.random(verify_len + 1)
        emitted = accept_rejection(laws, list(draft.laws), drafts, uniforms.tolist(), float(uniforms[-1]))
        tokens += emitted
        rounds.append(Round(draft.tokens.tolist(), chances.tolist(), verify_len, emitted))
    return tokens[len(prompt) : len(prompt) + num_tokens], rounds
