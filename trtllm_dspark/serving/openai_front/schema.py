"""Bodies of /v1/completions and /v1/chat/completions -> requests of the engine process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_dspark.errors import shown
from trtllm_dspark.serving.openai_front.errors import FrontError

# Fields that map straight to the engine's.
_DIRECT = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "priority": "priority",
    "latency_class": "latency_class",
    "timeout_ms": "timeout_ms",
}
# Fields that are taken only where they change nothing, and why.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "several choices a request are not implemented"),
    "best_of": ((1,), "several choices a request are not implemented"),
    "presence_penalty": ((0,), "penalties are not implemented"),
    "frequency_penalty": ((0,), "penalties are not implemented"),
    "logit_bias": (({},), "logit bias is not implemented"),
    "suffix": (("",), "insertion is not implemented"),
    "top_logprobs": ((0,), "only the chosen token's log probability is returned"),
    "tools": (([],), "tools are not implemented"),
    "tool_choice": (("none",), "tools are not implemented"),
    "functions": (([],), "tools are not implemented"),
    "function_call": (("none",), "tools are not implemented"),
    "response_format": (({"type": "text"},), "structured output is not implemented"),
    "modalities": ((["text"],), "only text is generated"),
}
_HARMLESS = ("user", "store", "metadata", "service_tier", "parallel_tool_calls")
_COMMON = {"model", "max_tokens", "stream", "stream_options", "stop", "logprobs", *_DIRECT, *_NEUTRAL, *_HARMLESS}
_COMPLETION = {*_COMMON, "prompt", "echo"}
_CHAT = {*_COMMON, "messages", "max_completion_tokens"}
_NO_LIMIT = 2**31 - 1  # the engine clamps to the room its sequences have
DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 64
"""Prompts of one completion: each is a request of the engine, and a body has room for millions."""


@dataclass(frozen=True, slots=True)
class FrontRequest:
    """One HTTP request.

    Attributes:
        rows: fields for the engine process, one map a choice.
        prefixes: text put before each row's output (`echo`).
        chat: whether it is a chat completion.
        stream: server-sent events instead of one body.
        include_usage: the stream ends with a chunk that carries the usage.
        logprobs: log probabilities are wanted.
    """

    rows: tuple[dict[str, Any], ...]
    prefixes: tuple[str, ...]
    chat: bool
    stream: bool
    include_usage: bool
    logprobs: bool


def parse_body(body: bytes, *, chat: bool, models: tuple[str, ...]) -> FrontRequest:
    """Read a request body.

    Raises:
        FrontError: not JSON, an unknown or unsupported field, or a wrong type; the message names the field.
    """
    data = _object(body)
    known = _CHAT if chat else _COMPLETION
    for name in data:
        if name not in known:
            raise FrontError(f"unknown field {shown(name)}", code="unknown_parameter", param=name[:80])
    model = data.get("model")
    if model not in models:
        raise FrontError(
            f"there is no model {shown(model)} here, only {models[0]!r}", code="model_not_found", param="model"
        )
    for name, (neutral, reason) in _NEUTRAL.items():
        value = data.get(name)
        if value is not None and value not in neutral:
            raise FrontError(f"{name} is not supported: {reason}", code="unsupported_feature", param=name)
    stream, logprobs = _boolean(data, "stream"), _logprobs(data, chat=chat)
    options = data.get("stream_options") or {}
    if not isinstance(options, dict):
        raise FrontError("stream_options must be an object", code="invalid_type", param="stream_options")
    common: dict[str, Any] = {
        **{field: data[name] for name, field in _DIRECT.items() if data.get(name) is not None},
        "max_tokens": _max_tokens(data, chat=chat),
        "stream": stream,
        "logprobs": logprobs,
        "return_tokens": logprobs,
        "return_token_texts": logprobs,
    }
    # OpenAI samples unless told otherwise; the engine's own default is greedy.
    common.setdefault("temperature", 1.0)
    if data.get("stop") is not None:
        common["stop"] = [data["stop"]] if isinstance(data["stop"], str) else data["stop"]
    rows: tuple[dict[str, Any], ...]
    prefixes: tuple[str, ...] = ("",)
    if chat:
        rows = ({**common, "messages": _messages(data)},)
    else:
        rows = tuple({**common, **prompt} for prompt in _prompts(data.get("prompt")))
        prefixes = _prefixes(rows, echo=_boolean(data, "echo"), logprobs=logprobs)
    return FrontRequest(rows, prefixes, chat, stream, bool(options.get("include_usage")), logprobs)


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrontError("the body is not valid JSON", code="invalid_json") from error
    if not isinstance(data, dict):
        raise FrontError("the body must be a JSON object", code="invalid_json")
    return data


def _boolean(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise FrontError(f"{name} must be true or false", code="invalid_type", param=name)
    return bool(value)


def _logprobs(data: Mapping[str, Any], *, chat: bool) -> bool:
    """Chat says true or false; completions say how many alternatives beside the chosen token: there are none."""
    value = data.get("logprobs")
    if chat:
        return _boolean(data, "logprobs")
    if value is None or value is False:
        return False
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1:
        raise FrontError(
            "logprobs must be 0 or 1: only the chosen token's log probability is returned",
            code="unsupported_feature",
            param="logprobs",
        )
    return True


def _max_tokens(data: Mapping[str, Any], *, chat: bool) -> Any:
    if chat and data.get("max_completion_tokens") is not None:
        return data["max_completion_tokens"]
    if data.get("max_tokens") is not None:
        return data["max_tokens"]
    return _NO_LIMIT if chat else DEFAULT_COMPLETION_TOKENS


def _messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise FrontError("messages must be a non-empty list of objects", code="invalid_type", param="messages")
    return [{**item, "content": _content(item.get("content"))} for item in messages]


def _content(content: Any) -> Any:
    """Join the text parts of a message; other parts are refused."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise FrontError("only text parts are supported in a message", code="unsupported_feature", param="messages")
        texts.append(part["text"])
    return "".join(texts)


def _prompts(prompt: Any) -> list[dict[str, Any]]:
    """Return a text, a list of texts, a list of ids or a list of lists of ids as one map each."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], str | list) and len(prompt) > MAX_PROMPTS:
            raise FrontError(
                f"prompt holds {len(prompt)} prompts and {MAX_PROMPTS} are allowed; send the others by themselves",
                code="out_of_range",
                param="prompt",
            )
        if all(isinstance(item, str) for item in prompt):
            return [{"prompt": item} for item in prompt]
        if all(isinstance(item, int) for item in prompt):
            return [{"prompt_token_ids": prompt}]
        if all(isinstance(item, list) for item in prompt):
            return [{"prompt_token_ids": item} for item in prompt]
    raise FrontError(
        "prompt must be a text, texts, token ids or lists of token ids", code="invalid_type", param="prompt"
    )


def _prefixes(rows: tuple[dict[str, Any], ...], *, echo: bool, logprobs: bool) -> tuple[str, ...]:
    if not echo:
        return ("",) * len(rows)
    if logprobs or any("prompt" not in row for row in rows):
        raise FrontError("echo works with text prompts and without logprobs", code="unsupported_feature", param="echo")
    return tuple(row["prompt"] for row in rows)
