"""Acceptance of ragged drafts, bit for bit.

Source: docs/core_numerics.md, section 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.reference.bits.chain import AcceptanceMode, Sampling
from trtllm_dspark.reference.bits.float32 import F32
from trtllm_dspark.reference.bits.heads import Int
from trtllm_dspark.reference.bits.philox import Stream, bits64
from trtllm_dspark.reference.bits.rows import (
    Masses,
    accept_test,
    coupled_pick,
    is_greedy,
    pick,
    residual_masses,
    row_masses,
    row_status,
    total,
)


@dataclass(frozen=True)
class Accepted:
    """tokens [R, gamma + 1] (unused tail -1), emitted_len [R] (0 on error), status [R]."""

    tokens: Int
    emitted_len: Int
    status: Int


def accept_ragged(
    target_logits: F32,
    verify_len: Sequence[int],
    positions: Sequence[int],
    sampling: Sampling,
    draft_tokens: Int,
    draft_masses: Sequence[Sequence[Masses]] | None = None,
    acceptance: AcceptanceMode = "rejection",
) -> Accepted:
    """Accept prefixes; arguments as in `trtllm_dspark._core.accept_ragged`, without masses a draft is a point mass."""
    num_requests, gamma = draft_tokens.shape
    tokens = np.full((num_requests, gamma + 1), -1, np.int64)
    emitted_len, status = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    first = 0
    for r, length in enumerate(verify_len):
        laws = None if draft_masses is None else draft_masses[r]
        request = _Request(sampling, r, int(positions[r]), acceptance, target_logits[first : first + length + 1], laws)
        emitted, status[r] = request.accept(draft_tokens[r, :length].tolist())
        tokens[r, : len(emitted)] = emitted
        emitted_len[r] = len(emitted)
        first += length + 1
    return Accepted(tokens, emitted_len, status)


@dataclass(frozen=True)
class _Request:
    sampling: Sampling
    index: int
    position: int
    acceptance: AcceptanceMode
    logits: F32
    draft_masses: Sequence[Masses] | None

    def accept(self, drafts: list[int]) -> tuple[list[int], int]:
        """Return (emitted tokens, status); only rows up to the first rejection are read."""
        emitted: list[int] = []
        for step, draft in enumerate([*drafts, -1]):
            status = row_status(self.logits[step])
            if status:
                return [], status
            token, accepted = self.emit(step, draft)
            emitted.append(token)
            if not accepted:
                break
        return emitted, 0

    def emit(self, step: int, draft: int) -> tuple[int, bool]:
        """Return the token of one row and whether it is the draft, accepted; the bonus row has draft -1."""
        r, seed, position = self.index, self.sampling.seed[self.index], self.position + 1 + step
        logits = self.logits[step]
        if self.acceptance == "greedy" or is_greedy(self.sampling.temperature[r]):
            best = int(np.argmax(logits))
            return best, best == draft
        target = row_masses(logits, self.sampling.temperature[r], self.sampling.top_k[r], self.sampling.top_p[r])
        if self.acceptance == "coupled":
            winner = coupled_pick(target, seed, position)
            return winner, winner == draft
        if draft < 0:
            return pick(target, bits64(seed, position, Stream.BONUS)), False
        law = self.draft_law(step, draft, len(target))
        test = bits64(seed, position, Stream.ACCEPT)
        if accept_test(test, int(target[draft]), total(target), int(law[draft]), total(law)):
            return draft, True
        residual = residual_masses(target, law)
        return pick(residual if residual.any() else target, bits64(seed, position, Stream.RESIDUAL)), False

    def draft_law(self, step: int, draft: int, vocab_size: int) -> Masses:
        if self.draft_masses is not None:
            return self.draft_masses[step]
        law = np.zeros(vocab_size, np.uint64)
        law[draft] = 1
        return law
