"""The draft chain of R requests, bit for bit.

Source: docs/core_numerics.md, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trtllm_dspark.reference.bits.float32 import F32
from trtllm_dspark.reference.bits.heads import Heads, Int, corrected_logits
from trtllm_dspark.reference.bits.philox import Stream, bits64
from trtllm_dspark.reference.bits.rows import Masses, coupled_pick, is_greedy, pick, row_masses, row_status

AcceptanceMode = Literal["greedy", "rejection", "coupled"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of R requests: temperature [R], seed [R], top_k [R] and top_p [R]."""

    temperature: Sequence[float]
    seed: Sequence[int]
    top_k: Sequence[int]
    top_p: Sequence[float]


@dataclass(frozen=True)
class Draft:
    """Drafted blocks: tokens [R, n] target ids (-1 after an error), masses [R][n] of V, status [R]."""

    tokens: Int
    masses: list[list[Masses]]
    status: Int


def draft_chain(
    heads: Heads,
    base_logits: F32,
    anchors: Int,
    positions: Int,
    sampling: Sampling,
    vocab_size: int,
    *,
    hidden: F32 | None = None,
    acceptance: AcceptanceMode = "rejection",
    num_candidates: int = 0,
    num_steps: int = 0,
) -> Draft:
    """Draw the draft tokens of each request; arguments as in `trtllm_dspark._core.draft_chain`."""
    num_requests, gamma, _ = base_logits.shape
    steps = num_steps or gamma
    tokens = np.full((num_requests, steps), -1, np.int64)
    status = np.zeros(num_requests, np.int64)
    masses: list[list[Masses]] = []
    for r in range(num_requests):
        rows = np.zeros((steps, 0), np.float32) if hidden is None else hidden[r]
        block = _Request(heads, vocab_size, sampling, r, acceptance, int(positions[r]), num_candidates)
        chosen, laws, status[r] = block.draft(base_logits[r, :steps], rows, int(anchors[r]))
        masses.append(laws)
        if status[r] == 0:
            tokens[r] = chosen
    return Draft(tokens, masses, status)


@dataclass(frozen=True)
class _Request:
    heads: Heads
    vocab_size: int
    sampling: Sampling
    index: int
    acceptance: AcceptanceMode
    position: int
    num_candidates: int

    def draft(self, base_logits: F32, hidden: F32, anchor: int) -> tuple[list[int], list[Masses], int]:
        tokens: list[int] = []
        laws: list[Masses] = []
        state, previous = np.zeros(self.heads.rank, np.float32), anchor
        for step, base in enumerate(base_logits):
            logits, state = corrected_logits(self.heads, base, state, previous, hidden[step])
            ids = np.arange(len(base))
            if self.num_candidates:
                ids = np.sort(np.argsort(-base, kind="stable")[: self.num_candidates])
                logits = logits[ids]
            status = row_status(logits)
            if status:
                return [], [], status
            previous, law = self.choose(logits, ids if self.heads.d2t is None else self.heads.d2t[ids], step)
            tokens.append(previous)
            laws.append(law)
        return tokens, laws, 0

    def choose(self, logits: F32, target_ids: Int, step: int) -> tuple[int, Masses]:
        """Return the token and its law over target ids."""
        law = np.zeros(self.vocab_size, np.uint64)
        r, seed = self.index, self.sampling.seed[self.index]
        if self.acceptance == "greedy" or is_greedy(self.sampling.temperature[r]):
            token = int(target_ids[int(np.argmax(logits))])
            law[token] = 1
            return token, law
        kept = row_masses(logits, self.sampling.temperature[r], self.sampling.top_k[r], self.sampling.top_p[r])
        law[target_ids] = kept
        if self.acceptance == "coupled":
            return coupled_pick(law, seed, self.position + 1 + step), law
        return int(target_ids[pick(kept, bits64(seed, self.position, Stream.DRAFT, step))]), law
