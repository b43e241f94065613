"""Text to ids and back, and the chat template, as the engine directory holds them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtllm_dspark.checkpoint.token_bytes import TokenBytes, token_bytes_of
from trtllm_dspark.engine_dir import EngineDirectory
from trtllm_dspark.errors import EngineError, RequestError, cut
from trtllm_dspark.runtime.detokenizer import Detokenizer
from trtllm_dspark.runtime.unicode_text import check_unicode

Message = Mapping[str, Any]


class Tokenizer:
    """A `tokenizer.json` with its chat template and end-of-sequence tokens.

    Args:
        tokenizer_json: content of `tokenizer.json`.
        chat_template: Jinja source, or None where the model has none.
        eos_token_ids: tokens that end a generation.
        bos_token_id: token that templates know as `bos_token`.

    Raises:
        EngineError: the tokenizer or the template cannot be read.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
    ) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise EngineError(f"tokenizer.json cannot be read ({error}); build the engine again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = None if chat_template is None else _compile(chat_template)
        self._specials = {
            "bos_token": self._token_text(bos_token_id),
            "eos_token": self._token_text(eos_token_ids[0] if eos_token_ids else None),
        }
        self.eos_token_ids = tuple(eos_token_ids)

    @staticmethod
    def open(engine: EngineDirectory) -> Tokenizer:
        """Read the tokenizer of an engine directory.

        Raises:
            EngineError: the engine was built without a tokenizer, or it cannot be read or not be decoded with.
        """
        template = engine.optional_file("chat_template.jinja")
        generation = engine.optional_file("generation_config.json")
        config = engine.manifest.target_config
        eos = tuple(config.eos_token_ids)
        if generation is not None:
            eos = tuple(dict.fromkeys((*eos, *_eos_ids(generation))))
        tokenizer = Tokenizer(
            engine.file("tokenizer.json").read_text(encoding="utf-8"),
            chat_template=None if template is None else template.read_text(encoding="utf-8"),
            eos_token_ids=eos,
            bos_token_id=config.bos_token_id,
        )
        # Now, not with the first request: engines of earlier versions were built without a look at the decoder.
        tokenizer.detokenizer()
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the tokens the model wants around it unless told otherwise.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        check_unicode("the prompt", text, code="invalid_text")
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the ids of a conversation, ready for the assistant's turn.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return a conversation as the text the model was trained on.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a raw prompt instead", code="no_chat_template")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **{**self._specials, **variables}
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # Templates quote what the messages hold.
            reason = cut(str(error), length=300)
            raise RequestError(f"the chat template refuses the messages: {reason}", code="chat_template") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, exactly as a stream of them would give it."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, token_ids))

    def detokenizer(self) -> Detokenizer:
        """Return a fresh incremental decoder for one output."""
        return Detokenizer(self._token_bytes)

    def token_text(self, token_id: int) -> str:
        """Return one token's own text, with U+FFFD for incomplete characters."""
        return self._token_bytes(token_id).decode("utf-8", errors="replace")

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._template is not None

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return token_bytes_of(self._tokenizer)

    def _token_text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._tokenizer.id_to_token(token_id) or ""


def _eos_ids(path: Path) -> tuple[int, ...]:
    value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _compile(source: str) -> jinja2.Template:
    # Templates come with downloaded checkpoints: the sandbox keeps them from reaching Python.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise EngineError(f"the chat template cannot be read ({error}); build the engine again") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
