"""The toy pair's tokenizer: one token a byte, so that characters of several bytes span several tokens."""

from __future__ import annotations

import json
from typing import Any

EOS, MASK, PAD = 0, 1, 2
VOCAB_SIZE = 256
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _printable() -> dict[int, str]:
    """Return byte -> character of the byte-level alphabet, for every byte that valid text uses."""
    used = [9, 10, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5)]
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte if byte in plain else 256 + others.index(byte)) for byte in used}


_ALPHABET = _printable()
_SPECIAL = ["<|end|>", "<|mask|>", "<|pad|>"]
BYTE_TO_ID = {byte: len(_SPECIAL) + index for index, byte in enumerate(_ALPHABET)}
"""UTF-8 byte -> token id."""


def tokenizer_json() -> str:
    """Return the `tokenizer.json`: bytes, three named special tokens, reserved ones up to VOCAB_SIZE."""
    num_reserved = VOCAB_SIZE - len(_SPECIAL) - len(_ALPHABET)
    reserved = [f"<|reserved_{index}|>" for index in range(num_reserved)]
    tokens = [*_SPECIAL, *_ALPHABET.values(), *reserved]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(tokens.index(token), token) for token in (*_SPECIAL, *reserved)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }
    return json.dumps(document, ensure_ascii=False)


def encode(text: str) -> list[int]:
    """Return the token ids of `text`, one a byte."""
    return [BYTE_TO_ID[byte] for byte in text.encode("utf-8")]


def _added(index: int, token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": True}
