"""Items of the engine process -> bodies and chunks as OpenAI's clients expect them."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from trtllm_dspark.serving.framing import Message
from trtllm_dspark.serving.openai_front.schema import FrontRequest

_REASONS = {"length": "length"}  # stop, cancelled -> "stop"


@dataclass
class Choice:
    """What one row has produced so far.

    Attributes:
        index: position among the choices.
        text: output so far.
        offset: characters before the next token, for completions' text_offset.
        started: whether a chunk has been sent.
    """

    index: int
    prefix: str
    text: str = ""
    offset: int = 0
    started: bool = False
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    tokens: list[tuple[str, float]] = field(default_factory=list)

    def add(self, item: Message) -> tuple[str, list[tuple[str, float]]]:
        """Take an item in and return its text and (token text, log probability) pairs."""
        text = item["text"] if self.started or not self.prefix else self.prefix + item["text"]
        self.started = True
        self.text += text
        pairs = list(zip(item.get("token_texts", ()), item.get("logprobs", ()), strict=False))
        self.tokens += pairs
        self.num_output_tokens += item["num_tokens"]
        if "finish_reason" in item:
            self.finish_reason = _REASONS.get(item["finish_reason"], "stop")
            self.num_prompt_tokens = item["stats"]["num_prompt_tokens"]
        return text, pairs


class Answer:
    """Builds the bodies of one request.

    Args:
        request: the request.
        model: the name that the client asked for.
    """

    def __init__(self, request: FrontRequest, model: str) -> None:
        self._request = request
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._kind = "chat.completion" if request.chat else "text_completion"
        self.choices = [Choice(index, prefix) for index, prefix in enumerate(request.prefixes)]

    def body(self) -> dict[str, Any]:
        """Return the whole answer once every choice has finished."""
        choices = []
        for choice in self.choices:
            entry: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
            if self._request.chat:
                entry["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                entry["text"] = choice.text
            entry["logprobs"] = self._logprobs(choice, choice.tokens, 0)
            choices.append(entry)
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.usage()}

    def chunk(self, index: int, item: Message) -> dict[str, Any]:
        """Take an item in and return its chunk."""
        choice = self.choices[index]
        first = not choice.started
        text, pairs = choice.add(item)
        entry: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
        if self._request.chat:
            entry["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            entry["text"] = text
        entry["logprobs"] = self._logprobs(choice, pairs, choice.offset)
        choice.offset += sum(len(token) for token, _ in pairs)
        chunk = {**self._head, "object": self._chunk_kind, "choices": [entry]}
        if self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk without choices that ends a stream with `include_usage`."""
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Return token counts over all choices."""
        prompt = sum(choice.num_prompt_tokens for choice in self.choices)
        output = sum(choice.num_output_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._request.chat else self._kind

    def _logprobs(self, choice: Choice, pairs: list[tuple[str, float]], offset: int) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        if self._request.chat:
            content = [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in pairs
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for token, _ in pairs:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": [token for token, _ in pairs],
            "token_logprobs": [value for _, value in pairs],
            "top_logprobs": None,
            "text_offset": offsets,
        }
