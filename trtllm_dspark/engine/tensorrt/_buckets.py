"""Which CUDA graph a round runs as: sizes are rounded up to a ladder, and the key holds everything a graph fixes."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_dspark.engine.tensorrt.device import Shape


def ladder(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to `limit`, which is the last step: at most half is padding."""
    steps, power = {limit}, 1
    while power < limit:
        steps |= {power} | ({power * 3 // 2} if power > 1 else set())
        power *= 2
    return tuple(sorted(step for step in steps if step <= limit))


def round_up(value: int, steps: tuple[int, ...]) -> int:
    """Return the first step that is not below `value`; the steps end at the largest value there is."""
    return next(step for step in steps if step >= value)


@dataclass(frozen=True, slots=True)
class RoundKey:
    """What is fixed in a captured round; two rounds share a graph only if all of it is equal.

    Attributes:
        num_requests: rows, padding rows included; they are slots 0 .. num_requests - 1.
        num_tokens: tokens of the target pass, padding included.
        draft_len: drafts of a block; 0 = a round without a block.
        mode: schedule mode of the confidence_schedule kernel.
        acceptance: code of the acceptance mode.
        bans: whether some request has tokens it may not choose yet.
    """

    num_requests: int
    num_tokens: int
    draft_len: int
    mode: int
    acceptance: int
    bans: bool

    @property
    def row_len(self) -> int:
        """S of the padded view."""
        return self.draft_len + 1


def choose_key(
    num_requests: int,
    num_drafts: int,
    *,
    draft_len: int,
    mode: int,
    acceptance: int,
    bans: bool,
    max_requests: int,
    max_tokens: int,
) -> RoundKey:
    """Return the smallest bucket that holds a round.

    Args:
        num_requests: live rows, at least 1.
        num_drafts: drafts that may be verified over all rows, at most.
        draft_len: drafts of a block; 0 = none.
        mode: schedule mode.
        acceptance: acceptance code.
        bans: whether tokens are forbidden.
        max_requests: rows the plans take.
        max_tokens: tokens the plans take in a decoding pass, at least num_requests + num_drafts.
    """
    rows = round_up(num_requests, ladder(max_requests))
    if rows + num_drafts > max_tokens:
        # Padding rows cost a token each; there is no room for them.
        rows = num_requests
    limit = min(max_tokens, rows * (draft_len + 1))
    tokens = round_up(min(rows + num_drafts, limit), ladder(limit))
    return RoundKey(rows, max(tokens, rows), draft_len, mode, acceptance, bans)


def target_shapes(num_requests: int, row_len: int, num_tokens: int, num_logits: int) -> dict[str, Shape]:
    """Return the input shapes of a target pass, caches left out."""
    return {
        "input_ids": (num_tokens,),
        "positions": (num_tokens,),
        "pack_index": (num_tokens,),
        "pad_index": (num_requests, row_len),
        "write_indices": (num_requests,),
        "logit_rows": (num_logits,),
    }


def context_shapes(num_requests: int, row_len: int, num_tokens: int, feature_size: int) -> dict[str, Shape]:
    """Return the input shapes of a pass of the drafter's context, caches left out."""
    return {
        "features": (num_tokens, feature_size),
        "positions": (num_tokens,),
        "pad_index": (num_requests, row_len),
        "write_indices": (num_requests,),
    }


def block_shapes(num_requests: int, block_size: int) -> dict[str, Shape]:
    """Return the input shapes of a pass of the drafter's block, caches left out."""
    return {"input_ids": (num_requests, block_size), "write_indices": (num_requests,)}
