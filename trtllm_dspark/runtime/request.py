"""What a caller asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.errors import RequestError, shown
from trtllm_dspark.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        request_id: the caller's name for it, unique among unfinished requests.
        prompt_token_ids: ids of the prompt, chat template and special tokens included.
        params: sampling and stopping.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)


def check_request(request: Request, limits: EngineLimits) -> None:
    """Refuse a request that the engine cannot serve.

    Raises:
        RequestError: the prompt is empty, too long or holds ids outside the vocabulary, or a stop token does.
    """
    prompt = request.prompt_token_ids
    if len(prompt) == 0:
        raise RequestError("the prompt has no tokens; give at least one", code="prompt_empty")
    if len(prompt) >= limits.max_seq_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the engine takes at most {limits.max_seq_len - 1} "
            "and one of output; shorten it or build with a larger --max_seq_len",
            code="prompt_too_long",
        )
    for name, tokens in (("prompt", prompt), ("stop_token_ids", request.params.stop_token_ids)):
        for token in tokens:
            if type(token) is bool or not isinstance(token, (int, np.integer)) or not 0 <= token < limits.vocab_size:
                raise RequestError(
                    f"{name} holds token id {shown(token)}, ids run from 0 to {limits.vocab_size - 1}; "
                    "encode with the engine's own tokenizer",
                    code="token_out_of_vocab",
                )
