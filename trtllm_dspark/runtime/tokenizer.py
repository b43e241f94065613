"""Text to ids and back, and the chat template, as the engine directory holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from trtllm_dspark.checkpoint.chat_template import compile_chat_template
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
        bos_token_id: token that templates know as `bos_token` unless `special_tokens` has another.
        special_tokens: `bos_token`, `eos_token`... as templates see them, None for one that the model does not have;
            what is absent follows from the ids.

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
        special_tokens: Mapping[str, str | None] | None = None,
    ) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise EngineError(f"tokenizer.json cannot be read ({error}); build the engine again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = None if chat_template is None else _compile(chat_template)
        specials: dict[str, str | None] = {
            "bos_token": self._token_text(bos_token_id),
            "eos_token": self._token_text(eos_token_ids[0] if eos_token_ids else None),
            **(special_tokens or {}),
        }
        # A token that the model does not have stays undefined, as templates that test for it expect.
        self._specials = {name: text for name, text in specials.items() if text is not None}
        self.eos_token_ids = tuple(eos_token_ids)

    @staticmethod
    def open(engine: EngineDirectory) -> Tokenizer:
        """Read the tokenizer of an engine directory.

        Raises:
            EngineError: the engine was built without a tokenizer, or it cannot be read or not be decoded with.
        """
        template = engine.optional_file("chat_template.jinja")
        generation = engine.optional_file("generation_config.json")
        # Absent in engines of earlier versions and where the checkpoint does not say.
        specials = engine.optional_file("special_tokens.json")
        config = engine.manifest.target_config
        eos = tuple(config.eos_token_ids)
        if generation is not None:
            eos = tuple(dict.fromkeys((*eos, *_eos_ids(generation))))
        tokenizer = Tokenizer(
            engine.file("tokenizer.json").read_text(encoding="utf-8"),
            chat_template=None if template is None else template.read_text(encoding="utf-8"),
            eos_token_ids=eos,
            bos_token_id=config.bos_token_id,
            special_tokens=None if specials is None else json.loads(specials.read_text(encoding="utf-8")),
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
            # Templates test `tools is not none`: what is not given is none, not undefined.
            given = {"tools": None, "documents": None, **self._specials, **variables}
            return self._template.render(messages=messages, add_generation_prompt=True, **given)
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
    try:
        return compile_chat_template(source)
    except jinja2.TemplateError as error:
        raise EngineError(f"the chat template cannot be read ({error}); build the engine again") from error
