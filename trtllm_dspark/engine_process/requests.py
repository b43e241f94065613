"""Check one request as it came over the socket and turn it into token ids and sampling parameters.

Every refusal is a RequestError with a machine-readable code. Only `max_tokens` and `min_tokens` are cut, to the room
the engine's sequences have; the finish reason is `length` then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trtllm_dspark.errors import RequestError, shown
from trtllm_dspark.runtime.sampling_params import LATENCY_CLASSES, LatencyClass

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1


class PromptEncoder(Protocol):
    """What the intake needs of `runtime.Tokenizer`."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation to the text the model continues."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return one token's own text."""
        ...


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for; the command line sets it, the engine's limits bound it.

    Attributes:
        max_seq_len: prompt and generated tokens together.
        vocab_size: token ids are below it.
        max_draft_len: the engine's gamma.
        max_prompt_bytes: UTF-8 bytes of the prompt, checked before tokenising.
        max_stop_words: stop strings of one request.
        max_stop_word_bytes: UTF-8 bytes of one stop string.
    """

    max_seq_len: int
    vocab_size: int
    max_draft_len: int
    max_prompt_bytes: int
    max_stop_words: int = 32
    max_stop_word_bytes: int = 1024


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One validated request."""

    prompt_token_ids: tuple[int, ...]
    prompt_text: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    max_draft_len: int | None
    priority: int
    timeout_s: float | None
    stream: bool
    echo: bool
    return_tokens: bool
    return_stats: bool
    return_token_texts: bool
    logprobs: bool
    latency_class: LatencyClass = "interactive"


_KNOWN = frozenset(
    {
        "prompt", "prompt_token_ids", "messages", "apply_chat_template", "max_tokens", "min_tokens", "temperature",
        "top_k", "top_p", "seed", "stop", "stop_token_ids", "stop_sequences", "ignore_eos", "max_draft_len", "priority",
        "timeout_ms", "stream", "echo", "return_tokens", "return_stats", "return_token_texts", "logprobs",
        "latency_class",
    }
)  # fmt: skip


def parse_request(fields: Mapping[str, Any], limits: RequestLimits, encoder: PromptEncoder) -> GenerationRequest:
    """Validate `fields` and tokenise the prompt.

    Raises:
        RequestError: with a code: missing_field, invalid_type, out_of_range, prompt_too_large, prompt_too_long, ...
    """
    reader = _Reader(fields)
    timeout_ms = reader.integer("timeout_ms", 1, INT32_MAX)
    seed = reader.integer("seed", 0, UINT64_MAX)
    max_tokens = reader.integer("max_tokens", 1, INT32_MAX)
    if max_tokens is None:
        raise RequestError("max_tokens is missing; give it", code="missing_field")
    min_tokens = reader.integer("min_tokens", 0, INT32_MAX) or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {min_tokens} but max_tokens only {max_tokens}; lower min_tokens", code="out_of_range"
        )
    temperature, top_k, top_p = _sampling(reader)
    stop = _stop_words(reader, limits, encoder)
    stop_token_ids = _stop_token_ids(reader, limits)
    text, token_ids = _prompt(reader, limits, encoder)
    room = limits.max_seq_len - len(token_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens and the engine holds {limits.max_seq_len} with at least one to "
            "generate; shorten the prompt or build the engine with a larger --max_seq_len",
            code="prompt_too_long",
        )
    return GenerationRequest(
        prompt_token_ids=tuple(token_ids),
        prompt_text=text,
        max_tokens=min(max_tokens, room),
        min_tokens=min(min_tokens, room),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=reader.boolean("ignore_eos"),
        max_draft_len=reader.integer("max_draft_len", 0, limits.max_draft_len),
        priority=reader.integer("priority", 1, 10) or 5,
        timeout_s=None if timeout_ms is None else timeout_ms / 1000.0,
        stream=reader.boolean("stream"),
        echo=reader.boolean("echo"),
        return_tokens=reader.boolean("return_tokens"),
        return_stats=reader.boolean("return_stats"),
        return_token_texts=reader.boolean("return_token_texts"),
        logprobs=reader.boolean("logprobs"),
        latency_class=_latency_class(reader),
    )


def _sampling(reader: _Reader) -> tuple[float, int, float]:
    """Return temperature, top_k (0 = all) and top_p (1 = all).

    A request that names none of the three is greedy, and so is one with temperature 0 or top_k 1; any other samples,
    with temperature 1 where it names none. top_p 0 means unset, as it always did for clients of this contract.
    """
    temperature = reader.number("temperature", 0.0, 100.0)
    top_k = reader.integer("top_k", 0, INT32_MAX)
    top_p = reader.number("top_p", 0.0, 1.0)
    samples = (top_k or 0) > 1 or (top_p or 0.0) > 0.0
    if temperature is None:
        temperature = 1.0 if samples else 0.0
    if top_k == 1:
        temperature = 0.0
    return temperature, top_k or 0, top_p or 1.0


def _latency_class(reader: _Reader) -> LatencyClass:
    if not reader.present("latency_class"):
        return "interactive"
    given = reader.text("latency_class")
    for known in LATENCY_CLASSES:
        if given == known:
            return known
    raise RequestError(f"latency_class is {shown(given)}; give {' or '.join(LATENCY_CLASSES)}", code="out_of_range")


def _stop_words(reader: _Reader, limits: RequestLimits, encoder: PromptEncoder) -> list[str]:
    words = [word for word in reader.strings("stop") if word]
    sequences = reader.sequences("stop_sequences", 0, limits.vocab_size - 1, limit=limits.max_stop_words)
    words += [word for word in (encoder.decode(sequence) for sequence in sequences if len(sequence) > 1) if word]
    if len(words) > limits.max_stop_words:
        raise RequestError(
            f"{len(words)} stop words were given and {limits.max_stop_words} are allowed", code="too_many_stop_words"
        )
    if any(len(word.encode("utf-8", "surrogatepass")) > limits.max_stop_word_bytes for word in words):
        raise RequestError(
            f"a stop word is longer than {limits.max_stop_word_bytes} bytes; shorten it", code="stop_word_too_long"
        )
    return words


def _stop_token_ids(reader: _Reader, limits: RequestLimits) -> list[int]:
    """Return single tokens that end the request: the given ones and stop sequences of length one."""
    last = limits.vocab_size - 1
    given = reader.integers("stop_token_ids", 0, last, limit=limits.max_stop_words)
    sequences = reader.sequences("stop_sequences", 0, last, limit=limits.max_stop_words)
    return [*given, *(sequence[0] for sequence in sequences if len(sequence) == 1)]


def _prompt(reader: _Reader, limits: RequestLimits, encoder: PromptEncoder) -> tuple[str, list[int]]:
    given = reader.present("prompt", "prompt_token_ids", "messages")
    if len(given) != 1:
        what = "no prompt was given" if not given else f"{' and '.join(given)} were given"
        raise RequestError(f"{what}; give exactly one of prompt, prompt_token_ids, messages", code="missing_field")
    # Always read: a value of the wrong type is refused with every kind of prompt.
    templated = reader.boolean("apply_chat_template")
    if given == ["prompt_token_ids"]:
        if templated:
            raise RequestError(
                "apply_chat_template renders text and prompt_token_ids are tokens already; leave it out, or give a "
                "prompt or messages",
                code="conflicting_fields",
            )
        token_ids = reader.integers("prompt_token_ids", 0, limits.vocab_size - 1, limit=limits.max_seq_len)
        if not token_ids:
            raise RequestError("the prompt has no tokens; give at least one", code="empty_prompt")
        return "", token_ids
    if given == ["messages"] and reader.present("apply_chat_template") and not templated:
        raise RequestError(
            "apply_chat_template is false and messages are always rendered; leave it out, or give a prompt",
            code="conflicting_fields",
        )
    chat = given == ["messages"] or templated
    if given == ["messages"]:
        text = encoder.render_chat(reader.messages(limits.max_prompt_bytes))
    else:
        text = reader.text("prompt")
        _check_size(text, limits)
        if chat:
            text = encoder.render_chat([{"role": "user", "content": text}])
    _check_size(text, limits)
    # A rendered conversation holds its special tokens already.
    token_ids = encoder.encode(text, add_special_tokens=not chat) if text else []
    if not token_ids:
        raise RequestError("the prompt is empty; give at least one character", code="empty_prompt")
    return text, token_ids


def _check_size(text: str, limits: RequestLimits) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limits.max_prompt_bytes:
        raise RequestError(
            f"the prompt has {size} bytes and {limits.max_prompt_bytes} are allowed; shorten it or start the server "
            "with a larger --max_prompt_bytes",
            code="prompt_too_large",
        )


class _Reader:
    """Typed access to a request's fields with errors that name the field."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}
        unknown = sorted(set(self._fields) - _KNOWN)
        if unknown:
            raise RequestError(f"unknown field {shown(unknown[0])}", code="unknown_field")

    def present(self, *names: str) -> list[str]:
        return [name for name in names if name in self._fields]

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise _type_error(name, "an integer", value)
        return int(_in_range(name, value, low, high))

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _type_error(name, "a number", value)
        if not math.isfinite(value):
            raise RequestError(f"{name} is {value}; give a finite number", code="not_finite")
        return float(_in_range(name, value, low, high))

    def boolean(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise _type_error(name, "true or false", value)
        return value

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise _type_error(name, "a string", value)
        return value

    def strings(self, name: str) -> list[str]:
        value = self._fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _type_error(name, "a list of strings", value)
        return value

    def integers(self, name: str, low: int, high: int, *, limit: int) -> list[int]:
        value = self._fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise _type_error(name, "a list of integers", value)
        if len(value) > limit:
            code = "prompt_too_long" if name == "prompt_token_ids" else "out_of_range"
            raise RequestError(f"{name} has {len(value)} entries and {limit} are allowed", code=code)
        for item in value:
            if not low <= item <= high:
                raise RequestError(
                    f"{name} holds {shown(item)}, which is outside {low}..{high}", code="token_id_out_of_range"
                )
        return value

    def sequences(self, name: str, low: int, high: int, *, limit: int) -> list[list[int]]:
        value = self._fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > limit:
            raise RequestError(f"{name} must be a list of at most {limit} lists", code="too_many_stop_words")
        return [_Reader({name: item}).integers(name, low, high, limit=64) for item in value]

    def messages(self, max_bytes: int) -> list[dict[str, Any]]:
        value = self._fields.get("messages")
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise _type_error("messages", "a non-empty list of maps", value)
        total = 0
        for item in value:
            if not isinstance(item.get("role"), str) or not isinstance(item.get("content"), str):
                raise RequestError("every message needs a 'role' and a 'content' string", code="invalid_type")
            total += len(item["content"])
        if total > max_bytes:
            raise RequestError(
                f"the messages have {total} characters and {max_bytes} are allowed", code="prompt_too_large"
            )
        return value


def _in_range(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise RequestError(f"{name} is {shown(value)}, which is outside {low}..{high}", code="out_of_range")
    return value


def _type_error(name: str, wanted: str, value: Any) -> RequestError:
    return RequestError(f"{name} must be {wanted}, not {type(value).__name__}", code="invalid_type")
