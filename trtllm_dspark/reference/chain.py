"""The draft chain in float64: one law and one token a slot, left to right."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.reference.heads import Array, Heads, first_state, markov_bias
from trtllm_dspark.reference.sampling import Law, token_law

Choose = Callable[[Law, int], int]
"""Picks a token of the law of step k (0-based)."""


class DraftBlock(NamedTuple):
    """A drafted block of one request.

    Attributes:
        tokens: [gamma] target ids.
        laws: [gamma, V] q: the law each token was drawn from, over target ids.
    """

    tokens: NDArray[np.int64]
    laws: Array


def draft_law(
    heads: Heads,
    base_logits: Array,
    state: Array,
    previous: int,
    hidden: Array | None,
    vocab_size: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    num_candidates: int = 0,
) -> tuple[Law, Array]:
    """Return (q [V] over target ids, next state) of one slot: softmax of U_k plus the sequential head's bias.

    Args:
        heads: sequential head and the draft vocabulary.
        base_logits: [Vd] U_k.
        state: [r] of the sequential head.
        previous: target id of the token before.
        hidden: [d] h_k, read by the gated and rnn heads.
        vocab_size: V of the target.
        temperature: of the request; below 1e-5 the law is a point mass.
        top_k: as in `token_law`.
        top_p: as in `token_law`.
        num_candidates: keep only the C largest entries of U_k (ties: lower id first), chosen before any bias or noise.

    Source: DSpark paper, section 3.1, equation 4.
    """
    bias, state = markov_bias(heads, state, previous, hidden)
    corrected = np.asarray(base_logits, np.float64) + bias
    if num_candidates:
        candidates = np.argsort(-np.asarray(base_logits), kind="stable")[:num_candidates]
        outside = np.setdiff1d(np.arange(len(corrected)), candidates)
        corrected[outside] = -np.inf
    law = np.zeros(vocab_size)
    law[heads.target_ids(len(corrected))] = token_law(corrected, temperature, top_k, top_p)
    return law, state


def draft_chain(
    heads: Heads,
    base_logits: Array,
    anchor: int,
    choose: Choose,
    vocab_size: int,
    *,
    hidden: Array | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    num_candidates: int = 0,
) -> DraftBlock:
    """Draw a block of tokens left to right.

    Args:
        heads: sequential head and the draft vocabulary.
        base_logits: [gamma, Vd] U; slot j predicts draft token j + 1.
        anchor: target id before the first draft token.
        choose: draws the token of a step from its law.
        vocab_size: V of the target.
        hidden: [gamma, d], read by the gated and rnn heads.
        temperature: of the request.
        top_k: as in `token_law`.
        top_p: as in `token_law`.
        num_candidates: as in `draft_law`.

    Source: DSpark paper, section 3.1, equations 4-6.
    """
    tokens, laws = [], []
    state, previous = first_state(heads), anchor
    for step, logits in enumerate(base_logits):
        row = None if hidden is None else hidden[step]
        law, state = draft_law(
            heads, logits, state, previous, row, vocab_size,
            temperature=temperature, top_k=top_k, top_p=top_p, num_candidates=num_candidates,
        )  # fmt: skip
        previous = choose(law, step)
        tokens.append(previous)
        laws.append(law)
    return DraftBlock(np.array(tokens, np.int64), np.array(laws).reshape(len(tokens), vocab_size))
