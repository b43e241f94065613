"""The state of one request between its arrival and its last output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.runtime.detokenizer import Detokenizer
from trtllm_dspark.runtime.request import Request
from trtllm_dspark.runtime.sampling_params import SamplingParams
from trtllm_dspark.runtime.stats import RequestStats
from trtllm_dspark.runtime.stopping import StopStrings

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request the session knows.

    Attributes:
        request: what was asked for.
        prompt: [n] int64.
        seed: key of its random streams.
        speculates: whether its drafter context is kept up and drafts may be verified.
        max_draft_len: most drafts verified in one round.
        end_tokens: ids that end it.
        banned_tokens: the same as an array, or None when nothing is banned before `min_tokens`.
        max_total_tokens: prompt and output together at most.
        slot: its row in every cache, or NO_SLOT.
        num_cached: tokens in the target's cache; the anchor's position once it decodes.
        num_context: tokens in the drafter's context.
        anchor: last emitted token, not yet in the target's cache.
        features: target features of cached tokens that the drafter has not absorbed, in order, one array a pass.
        cancelled: it ends before the next round.
    """

    request: Request
    prompt: IntArray
    seed: int
    speculates: bool
    max_draft_len: int
    end_tokens: frozenset[int]
    banned_tokens: IntArray | None
    max_total_tokens: int
    stats: RequestStats
    stop_strings: StopStrings
    detokenizer: Detokenizer | None
    slot: int = NO_SLOT
    num_cached: int = 0
    num_context: int = 0
    anchor: int = -1
    num_output: int = 0
    features: list[FloatArray] = field(default_factory=list)
    cancelled: bool = False

    @property
    def params(self) -> SamplingParams:
        """Sampling and stopping."""
        return self.request.params

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is cached, or will be when the rounds in flight are through."""
        return self.num_cached >= self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return min(self.params.max_tokens - self.num_output, self.max_total_tokens - self.num_prompt - self.num_output)

    @property
    def draft_cap(self) -> int:
        """Most drafts worth verifying now: a round that verifies ell drafts emits up to ell + 1 tokens."""
        return min(self.max_draft_len, self.remaining - 1) if self.speculates else 0

    @property
    def num_pending(self) -> int:
        """Cached tokens that the drafter has not absorbed: as many as rows in `features`, however many arrays."""
        return self.num_cached - self.num_context if self.features else 0

    @property
    def ban_len(self) -> int:
        """Coming output tokens for which end tokens cannot be chosen."""
        return 0 if self.banned_tokens is None else self.params.min_tokens - self.num_output


def make_active(
    request: Request,
    *,
    seed: int,
    now: float,
    max_seq_len: int,
    block_len: int,
    max_draft_len: int,
    eos_token_ids: Sequence[int],
    detokenizer: Detokenizer | None,
) -> ActiveRequest:
    """Return the initial state of a checked request.

    Args:
        request: what was asked for.
        seed: key of its random streams.
        now: clock, seconds.
        max_seq_len: prompt and output tokens at most.
        block_len: length of the per-position counters.
        max_draft_len: drafts the session verifies of a request at most; 0 = it does not speculate.
        eos_token_ids: the model's end-of-sequence tokens.
        detokenizer: turns its output into text, or None.
    """
    params = request.params
    end_tokens = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
    cap = max_draft_len if params.max_draft_len is None else min(max_draft_len, params.max_draft_len)
    speculates = params.speculation and cap > 0
    banned = np.array(sorted(end_tokens), np.int64) if params.min_tokens > 0 and end_tokens else None
    return ActiveRequest(
        request=request,
        prompt=np.array(request.prompt_token_ids, np.int64),
        seed=seed,
        speculates=speculates,
        max_draft_len=cap if speculates else 0,
        end_tokens=end_tokens,
        banned_tokens=banned,
        max_total_tokens=max_seq_len,
        stats=RequestStats(len(request.prompt_token_ids), block_len, now),
        stop_strings=StopStrings(params.stop),
        detokenizer=detokenizer,
    )
