"""The bytes behind each token of a tokenizer, where its decoder is of a kind that is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tokenizers

from trtllm_dspark.errors import EngineError

TokenBytes = Callable[[int], bytes]


def token_bytes_of(tokenizer: tokenizers.Tokenizer) -> TokenBytes:
    """Return the function that gives each token's bytes.

    Args:
        tokenizer: its decoder is byte-level, Metaspace, or a sequence of Replace, ByteFallback, Fuse and Strip.

    Raises:
        EngineError: the decoder is of another kind.
    """
    # A decoder says what it is only in its serialised form; the whole tokenizer's would take 30 MB to parse.
    convert = _piece_converter(None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__()))
    added = tokenizer.get_added_tokens_decoder()
    cache = {token_id: b"" if token.special else token.content.encode() for token_id, token in added.items()}

    def token_bytes(token_id: int) -> bytes:
        found = cache.get(token_id)
        if found is None:
            # Ids above the vocabulary exist where a model's embedding is padded; they have no text.
            piece = tokenizer.id_to_token(token_id)
            found = cache[token_id] = b"" if piece is None else convert(piece)
        return found

    return token_bytes


def _piece_converter(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {str(step["type"]) for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if kinds and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        replacements = [_replacement(step) for step in steps if step["type"] in ("Metaspace", "Replace")]
        return lambda piece: _byte_fallback(piece, replacements)
    raise EngineError(
        f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported; "
        "byte-level and SentencePiece-style decoders are"
    )


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return str(step.get("replacement", "\u2581")), " "
    pattern = step["pattern"].get("String")
    if pattern is None:
        raise EngineError(
            "the tokenizer's decoder (Replace of a regular expression) is not supported; byte-level and "
            "SentencePiece-style decoders are"
        )
    return str(pattern), str(step["content"])


def _byte_fallback(piece: str, replacements: list[tuple[str, str]]) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    for old, new in replacements:
        piece = piece.replace(old, new)
    return piece.encode()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Map the 256 printable characters of byte-level BPE back to bytes: printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()
