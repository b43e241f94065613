"""What becomes of the tokens a round decided: stops, text, counters, one output."""

from __future__ import annotations

from trtllm_dspark import _core
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.outputs import FinishReason, RequestOutput
from trtllm_dspark.runtime.round import Emitted
from trtllm_dspark.runtime.stats import SessionStats

_STATUS_TEXT = {
    _core.STATUS_NAN_LOGITS: ("the target's logits are not numbers (NaN or +inf)", "nan_logits"),
    _core.STATUS_NO_FINITE_LOGITS: ("no token is left to choose (every logit is -inf)", "no_finite_logits"),
}


def commit(emitted: Emitted, *, now: float, stats: SessionStats) -> RequestOutput:
    """Append a round's tokens to a request, up to where it ends, and return its output of the round."""
    request = emitted.request
    if emitted.choice.status != _core.STATUS_OK:
        text, code = _STATUS_TEXT.get(
            emitted.choice.status, (f"the core refused its logits ({emitted.choice.status})", "bad_logits")
        )
        return end_request(request, "error", error=f"{text} at output token {request.num_output + 1}", error_code=code)
    token_ids: list[int] = []
    pieces: list[str] = []
    reason: FinishReason | None = None
    stop_reason: str | int | None = None
    for token in emitted.choice.tokens:
        token_ids.append(token)
        request.num_output += 1
        past_minimum = request.num_output >= request.params.min_tokens
        if token in request.end_tokens and past_minimum:
            reason, stop_reason = "stop", token
        elif request.detokenizer is not None:
            certain, found = request.stop_strings.push(request.detokenizer.push(token), armed=past_minimum)
            pieces.append(certain)
            if found is not None:
                reason, stop_reason = "stop", found
        if reason is None and request.remaining <= 0:
            reason = "length"
        if reason is not None:
            break
    if not isinstance(stop_reason, str) and reason is not None:
        pieces.append(request.stop_strings.flush())
    _advance(request, emitted, len(token_ids))
    _count(request, emitted, len(token_ids), now, stats)
    return RequestOutput(
        request_id=request.request.request_id,
        new_token_ids=tuple(token_ids),
        text_delta="".join(pieces),
        finished=reason is not None,
        finish_reason=reason,
        stats=request.stats,
        stop_reason=stop_reason,
        logprobs=tuple(emitted.choice.logprobs[: len(token_ids)]),
    )


def end_request(
    request: ActiveRequest, reason: FinishReason, *, error: str | None = None, error_code: str | None = None
) -> RequestOutput:
    """Return the last output of a request that ends without new tokens; text that was held back is given out."""
    return RequestOutput(
        request_id=request.request.request_id,
        new_token_ids=(),
        text_delta=request.stop_strings.flush(),
        finished=True,
        finish_reason=reason,
        stats=request.stats,
        error=error,
        error_code=error_code,
    )


def _advance(request: ActiveRequest, emitted: Emitted, count: int) -> None:
    """Move the anchor: the tokens before the last one are in the target's cache now."""
    if not emitted.prefill:
        request.num_cached += count
    request.anchor = emitted.choice.tokens[count - 1]
    if emitted.features is not None:
        request.features.append(emitted.features)


def _count(request: ActiveRequest, emitted: Emitted, count: int, now: float, stats: SessionStats) -> None:
    request.stats.note_tokens(count, now)
    stats.output_tokens += count
    if emitted.prefill:
        return
    # A block clipped by a stop counts what was emitted, so the drafts behind the stop do not count as accepted.
    accepted = min(len(emitted.choice.tokens) - 1, count)
    for acceptance in (request.stats.acceptance, stats.acceptance):
        acceptance.record(drafted=emitted.drafted, verified=emitted.verified, accepted=accepted, emitted=count)
