"""From a validated request to the session's own request type."""

from __future__ import annotations

from trtllm_dspark.engine_process.requests import GenerationRequest
from trtllm_dspark.runtime.request import Request
from trtllm_dspark.runtime.sampling_params import SamplingParams


def make_session_request(session_id: str, request: GenerationRequest, *, max_draft_len: int | None = None) -> Request:
    """Return what `Session.add` takes.

    Args:
        session_id: the request's name in the session.
        request: the request.
        max_draft_len: gamma of the session's engine, where it may be smaller than what the request was checked against.

    Raises:
        RequestError: the session's own limits refuse a value.
    """
    wanted = request.max_draft_len
    if wanted is not None and max_draft_len is not None:
        wanted = min(wanted, max_draft_len)
    params = SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        speculation=wanted != 0,
        max_draft_len=wanted or None,
        logprobs=request.logprobs,
        latency_class=request.latency_class,
    )
    return Request(request_id=session_id, prompt_token_ids=request.prompt_token_ids, params=params)
