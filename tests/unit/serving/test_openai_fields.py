"""Fields of the OpenAI front that the engine's own intake checks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trtllm_dspark.serving.openai_front.errors import FrontError
from trtllm_dspark.serving.openai_front.schema import MAX_PROMPTS, FrontRequest, parse_body


def row(**fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": "m", "prompt": "a", **fields}).encode()
    return parse_body(body, chat=False, models=("m",)).rows[0]


def completion(prompt: Any) -> FrontRequest:
    return parse_body(json.dumps({"model": "m", "prompt": prompt}).encode(), chat=False, models=("m",))


@pytest.mark.parametrize("prompt", ["a", [5]])
def test_prompts_of_one_request_are_limited(prompt: Any) -> None:
    assert len(completion([prompt] * MAX_PROMPTS).rows) == MAX_PROMPTS == 64
    for count in (MAX_PROMPTS + 1, 1_000_000):
        with pytest.raises(FrontError, match=f"prompt holds {count} prompts and 64 are allowed") as refused:
            completion([prompt] * count)
        assert (refused.value.code, refused.value.param) == ("out_of_range", "prompt")


def test_tokens_of_one_prompt_are_no_prompts() -> None:
    assert len(completion([5] * 1000).rows) == 1


def test_refusal_shows_the_beginning_of_a_long_name() -> None:
    for body in ({"model": "x" * 10**6}, {"model": ["x" * 10**6] * 3}, {"model": "m", "x" * 10**6: 1}):
        with pytest.raises(FrontError, match="'xxx") as refused:
            parse_body(json.dumps({"prompt": "a", **body}).encode(), chat=False, models=("m",))
        assert len(str(refused.value)) < 200


def test_latency_class_reaches_the_engine_as_it_is() -> None:
    assert "latency_class" not in row()
    # The intake refuses what is neither interactive nor batch (test_requests.py).
    assert [row(latency_class=value)["latency_class"] for value in ("batch", "fast")] == ["batch", "fast"]


def test_misspelt_latency_class_is_refused_by_name() -> None:
    with pytest.raises(FrontError, match="latency_clas"):
        row(latency_clas="batch")
