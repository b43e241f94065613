"""The prompts file of `run` and `bench` (docs/file_formats.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_dspark.errors import RequestError, UsageError
from trtllm_dspark.runtime import Tokenizer
from trtllm_dspark.runtime.unicode_text import check_unicode

SAMPLING_FIELDS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_draft_len",
    "speculation",
    "latency_class",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompts file.

    Attributes:
        index: line of the file, from 0.
        text: user message.
        domain: label for grouping, or None.
        sampling: sampling parameters that replace the flags of the same name.
    """

    index: int
    text: str
    domain: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: Path) -> list[Prompt]:
    """Read a prompts file; empty lines are skipped.

    Raises:
        UsageError: the file cannot be read, a line is malformed, or there is no prompt in it.
    """
    try:
        # Other separators of str.splitlines, U+2028 for one, may stand inside a JSON string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"--prompts_file {path} cannot be read ({error.strerror}); give a JSONL file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompts_file {path} is not UTF-8 ({error.reason} at byte {error.start})") from error
    prompts = [_parse(line, index, f"--prompts_file {path} line {index + 1}") for index, line in _filled(lines)]
    if not prompts:
        raise UsageError(f"--prompts_file {path} holds no prompts; give one JSON object a line")
    return prompts


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, *, raw: bool) -> list[int]:
    """Return a prompt's ids, through the chat template unless `raw`.

    Raises:
        RequestError: the model has no chat template, or the template refuses the prompt.
    """
    if raw:
        return tokenizer.encode(prompt.text)
    if not tokenizer.has_chat_template:
        raise RequestError("this model has no chat template; add --raw")
    return tokenizer.encode_chat([{"role": "user", "content": prompt.text}])


def _filled(lines: Sequence[str]) -> list[tuple[int, str]]:
    return [(index, line) for index, line in enumerate(lines) if line.strip()]


def _parse(line: str, index: int, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise UsageError(f'{where} must be an object like {{"prompt": "..."}}')
    text, domain = row.pop("prompt", None), row.pop("domain", None)
    if not isinstance(text, str) or not text:
        raise UsageError(f"{where} has no 'prompt' text")
    if domain is not None and not isinstance(domain, str):
        raise UsageError(f"{where} has a 'domain' that is not text")
    check_unicode(f"{where}: the domain", domain or "", code="invalid_domain")
    unknown = [name for name in row if name not in SAMPLING_FIELDS]
    if unknown:
        raise UsageError(
            f"{where} has the unknown field '{unknown[0]}'; known are prompt, domain, {', '.join(SAMPLING_FIELDS)}"
        )
    if "speculation" in row:
        if row["speculation"] != "off":
            raise UsageError(f"{where}: 'speculation' of one prompt can only be \"off\"; use --speculation for others")
        row["speculation"] = False
    return Prompt(index, text, domain, row)
