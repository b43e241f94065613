"""What a session gives back: one object per request and round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtllm_dspark.runtime.stats import RequestStats

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything one request gained in one round.

    Attributes:
        request_id: the request's name.
        new_token_ids: tokens of this round in order; a token that ended the request is the last of them.
        text_delta: text that is now certain. Characters whose bytes are incomplete and text that may still become a
            stop string are held back; the deltas of a request concatenate to its full text.
        finished: no further output of this request follows.
        finish_reason: "stop" (end of sequence, stop token or stop string), "length" (max_tokens or the engine's
            max_seq_len), "cancelled", "error", or None while it goes on.
        stop_reason: the stop string or the token id that ended the request, where one did.
        error: one sentence, for finish_reason "error".
        error_code: machine-readable reason, for finish_reason "error".
        logprobs: log-probability of each of `new_token_ids`, where the request asked for them.
        stats: counters of the request so far; a live object, final once `finished`.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    text_delta: str
    finished: bool
    finish_reason: FinishReason | None
    stats: RequestStats
    stop_reason: str | int | None = None
    error: str | None = None
    error_code: str | None = None
    logprobs: tuple[float, ...] = ()
