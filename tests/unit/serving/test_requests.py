"""Validation of requests as they come over the socket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from trtllm_dspark.engine_process.requests import RequestLimits, parse_request
from trtllm_dspark.engine_process.session_request import make_session_request
from trtllm_dspark.errors import RequestError

LIMITS = RequestLimits(max_seq_len=32, vocab_size=100, max_draft_len=7, max_prompt_bytes=100)


class Encoder:
    """One token a character; a chat is its last message between brackets."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) % 100 for character in text]

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return f"[{messages[-1]['content']}]"

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def parse(**fields: Any) -> Any:
    return parse_request({"prompt": "ab", "max_tokens": 4, **fields}, LIMITS, Encoder())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.0, 0, 1.0)),
        ({"temperature": 0.8}, (0.8, 0, 1.0)),
        ({"temperature": 0.0, "top_p": 0.9}, (0.0, 0, 0.9)),
        ({"top_p": 0.9}, (1.0, 0, 0.9)),
        ({"top_k": 5}, (1.0, 5, 1.0)),
        ({"top_k": 1, "top_p": 0.0, "temperature": 1.0}, (0.0, 1, 1.0)),
        ({"top_p": 0.0}, (0.0, 0, 1.0)),
    ],
)
def test_parse_sampling_defaults(fields: dict[str, Any], expected: tuple[float, int, float]) -> None:
    request = parse(**fields)
    assert (request.temperature, request.top_k, request.top_p) == expected


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": None}, "missing_field"),
        ({"prompt": None}, "missing_field"),
        ({"prompt_token_ids": [1]}, "missing_field"),
        ({"max_tokens": True}, "invalid_type"),
        ({"max_tokens": 1.0}, "invalid_type"),
        ({"temperature": "hot"}, "invalid_type"),
        ({"temperature": float("nan")}, "not_finite"),
        ({"stream": 1}, "invalid_type"),
        ({"latency_class": "fast"}, "out_of_range"),
        ({"latency_class": 1}, "invalid_type"),
        ({"stop": "word"}, "invalid_type"),
        ({"stop": [1]}, "invalid_type"),
        ({"stop_token_ids": [100]}, "token_id_out_of_range"),
        ({"stop_sequences": [[5, 100]]}, "token_id_out_of_range"),
        ({"prompt": None, "prompt_token_ids": []}, "empty_prompt"),
        ({"prompt": None, "prompt_token_ids": [1] * 33}, "prompt_too_long"),
        ({"prompt": None, "prompt_token_ids": [1] * 32}, "prompt_too_long"),
        ({"prompt": None, "messages": []}, "invalid_type"),
        ({"prompt": None, "messages": [{"role": "user"}]}, "invalid_type"),
        ({"prompt": None, "messages": [{"role": "user", "content": "x" * 101}]}, "prompt_too_large"),
        ({"prompt": "é" * 51}, "prompt_too_large"),
        ({"colour": "red"}, "unknown_field"),
        ({"seed": -1}, "out_of_range"),
        ({"seed": 2**64}, "out_of_range"),
        ({"apply_chat_template": 1}, "invalid_type"),
        ({"prompt": None, "prompt_token_ids": [1], "apply_chat_template": "no"}, "invalid_type"),
        ({"prompt": None, "prompt_token_ids": [1], "apply_chat_template": True}, "conflicting_fields"),
        ({"prompt": None, "messages": [{"role": "user", "content": "a"}], "apply_chat_template": 1}, "invalid_type"),
        (
            {"prompt": None, "messages": [{"role": "user", "content": "a"}], "apply_chat_template": False},
            "conflicting_fields",
        ),
    ],
)
def test_parse_bad_field_is_refused_with_code(fields: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    assert refused.value.code == code


def test_parse_max_tokens_is_clamped_to_the_room_left() -> None:
    assert parse(max_tokens=1000).max_tokens == 32 - 3
    assert parse(max_tokens=1000, min_tokens=500).min_tokens == 32 - 3


def test_parse_chat_is_rendered_and_not_given_special_tokens_twice() -> None:
    assert parse(apply_chat_template=True).prompt_text == "[ab]"
    request = parse(prompt=None, messages=[{"role": "user", "content": "hi"}])
    assert request.prompt_text == "[hi]"
    assert len(request.prompt_token_ids) == 4
    assert len(parse().prompt_token_ids) == 3


def test_parse_chat_template_that_changes_nothing_is_taken() -> None:
    assert parse(prompt=None, prompt_token_ids=[1], apply_chat_template=False).prompt_token_ids == (1,)
    assert parse(apply_chat_template=False).prompt_text == "ab"
    messages = [{"role": "user", "content": "hi"}]
    assert parse(prompt=None, messages=messages, apply_chat_template=True).prompt_text == "[hi]"


def test_parse_chat_template_beside_tokens_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="apply_chat_template renders text and prompt_token_ids are tokens already"):
        parse(prompt=None, prompt_token_ids=[1], apply_chat_template=True)


def test_parse_refusal_shows_the_beginning_of_a_long_value() -> None:
    for fields in ({"latency_class": "x" * 10**6}, {"x" * 10**6: 1}):
        with pytest.raises(RequestError, match="'xxx") as refused:
            parse(**fields)
        assert len(str(refused.value)) < 200


def test_parse_stop_sequences_become_ids_and_strings() -> None:
    request = parse(stop=["x", ""], stop_token_ids=[7], stop_sequences=[[9], [65, 66]])
    assert request.stop == ("x", "AB")
    assert request.stop_token_ids == (7, 9)


def test_parse_latency_class_is_interactive_unless_it_says_batch() -> None:
    assert parse().latency_class == "interactive"
    assert parse(latency_class="interactive").latency_class == "interactive"
    request = parse(latency_class="batch")
    assert make_session_request("1", request, max_draft_len=4).params.latency_class == "batch"


def test_parse_latency_class_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="latency_class is 'fast'; give interactive or batch"):
        parse(latency_class="fast")
