"""Translate the tokenizer in GGUF metadata into a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint.types import TokenizerAssets
from trtllm_dspark.errors import CheckpointError

_USER_DEFINED, _CONTROL = 4, 3

# Converters rarely write which token ends a turn; programs that run GGUF files know it by its text.
_END_TEXTS = frozenset(
    """
    <|eot_id|> <|im_end|> <|endoftext|> <|end_of_text|> <|eom_id|> <|end|> <EOT> _<EOT> <end_of_turn>
    <end_of_utterance>
    """.split()
)

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same, but every digit is a piece of its own.
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _byte_level(True),
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, _byte_level(True)),
    "llama-bpe": _sequence(_split(_LLAMA3_SPLIT), _byte_level(False)),
    "qwen2": _sequence(_split(_QWEN2_SPLIT), _byte_level(False)),
}
"""`tokenizer.ggml.pre` -> how text is cut before the merges apply."""


def read_tokenizer(path: Path, metadata: dict[str, Any]) -> TokenizerAssets | None:
    """Return the tokenizer of a GGUF file; None when the file has none.

    Raises:
        CheckpointError: the tokenizer is not a byte-level BPE of a known kind, or its tables do not fit.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported, expected 'gpt2' with one of "
            f"{', '.join(_PRE_TOKENIZERS)}; use the model's Hugging Face directory instead"
        )
    tokens: list[str] = _list(path, metadata, "tokens", str)
    types: list[int] = _list(path, metadata, "token_type", int)
    merges: list[str] = _list(path, metadata, "merges", str)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{path}: {len(tokens)} tokens ({len(set(tokens))} distinct) with {len(types)} types; the file is damaged"
        )
    bos = special_id(path, metadata, "bos")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [_merge(path, merge) for merge in merges],
        },
    }
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        document["post_processor"] = _prepend(tokens[bos], bos)
    generation = {
        "bos_token_id": bos,
        "eos_token_id": list(end_ids(path, metadata)),
        "pad_token_id": special_id(path, metadata, "padding"),
    }
    known = {name: value for name, value in generation.items() if value is not None}
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: tokenizer.chat_template is no text; the file is damaged")
    return TokenizerAssets(json.dumps(document, ensure_ascii=False), template, known)


def end_ids(path: Path, metadata: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a generation: end of sequence, of turn and of message, then those known by their text.

    A token that the file calls its unknown token has a meaning of its own and is not taken by its text.
    """
    found = [special_id(path, metadata, name) for name in ("eos", "eot", "eom")]
    if metadata.get("tokenizer.ggml.model") is not None:
        tokens, types = _list(path, metadata, "tokens", str), _list(path, metadata, "token_type", int)
        unknown = metadata.get("tokenizer.ggml.unknown_token_id")
        found += [
            index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL and token in _END_TEXTS and index != unknown
        ]
    return tuple(dict.fromkeys(index for index in found if index is not None))


def special_id(path: Path, metadata: dict[str, Any], name: str) -> int | None:
    """Return `{name}_token_id`, or None where the file has none."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    count = len(metadata.get("tokenizer.ggml.tokens", ()))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise CheckpointError(f"{path}: {name}_token_id is {value!r}, outside the vocabulary of {count} tokens")
    return value


def _list(path: Path, metadata: dict[str, Any], name: str, kind: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise CheckpointError(f"{path}: tokenizer.ggml.{name} is no list of {kind.__name__}; the file is damaged")
    return values


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _merge(path: Path, merge: str) -> list[str]:
    # A merge is two pieces with one space between; byte-level pieces hold no space themselves.
    pieces = merge.split(" ")
    if len(pieces) != 2:
        raise CheckpointError(f"{path}: tokenizer merge {merge!r} is not two pieces; the vocabulary is damaged")
    return pieces


def _prepend(token: str, index: int) -> dict[str, Any]:
    """Return the post-processor that puts one special token in front of a sequence."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, special, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }
