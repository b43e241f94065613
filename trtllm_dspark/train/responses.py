"""Sequences that a target generated: what a drafter is trained on (one JSON object a line, docs/training.md)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_dspark.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Response:
    """A prompt and what the target answered.

    Attributes:
        domain: label for grouping; `self_made` when the target wrote the user's turn too.
        temperature: at which the response was drawn.
        response_start: index of the response's first token.
        token_ids: prompt and response.
        index: job it answers, -1 for a response from elsewhere.
        first_position: position of `token_ids[0]`; above 0 where the prompt is not known and its features are not part
            of any context.
    """

    domain: str
    temperature: float
    response_start: int
    token_ids: tuple[int, ...]
    index: int = -1
    first_position: int = 0

    @property
    def num_anchors(self) -> int:
        """Positions that can start a block: response tokens with at least one token after them."""
        return max(0, len(self.token_ids) - self.response_start - 1)

    def to_json(self) -> str:
        """Return the line of a responses file, without its end."""
        fields = {
            "index": self.index,
            "domain": self.domain,
            "temperature": self.temperature,
            "response_start": self.response_start,
            "token_ids": self.token_ids,
        }
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def read_responses(path: Path, vocab_size: int, *, unfinished: bool = False) -> list[Response]:
    """Read a responses file; empty lines are skipped.

    Args:
        path: JSON lines with `token_ids` and `response_start`, and optionally `domain`, `temperature` and `index`.
        vocab_size: V; every id must be below.
        unfinished: leave out a last line that was cut off, as a killed writer leaves it.

    Raises:
        UsageError: the file cannot be read or a line is malformed; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give a responses file") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}); give a responses file"
        ) from error
    if unfinished:
        lines = lines[:-1]
    return [_parse(line, f"{path} line {number}", vocab_size) for number, line in enumerate(lines, 1) if line.strip()]


def fitting(responses: Sequence[Response], max_seq_len: int, what: str) -> list[Response]:
    """Return the sequences of at most `max_seq_len` positions; a warning counts the others as `what`."""
    kept = [response for response in responses if response.first_position + len(response.token_ids) <= max_seq_len]
    if len(kept) < len(responses):
        left = len(responses) - len(kept)
        logger.warning("%d %s exceed --max_seq_len %d and are left out", left, what, max_seq_len)
    return kept


def _parse(line: str, where: str, vocab_size: int) -> Response:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON ({error}); correct or remove it") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where} must be an object with token_ids and response_start; correct or remove it")
    ids, start = row.get("token_ids"), row.get("response_start")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise UsageError(f"{where} has no 'token_ids' list of ids below {vocab_size}; correct or remove it")
    if type(start) is not int or not 1 <= start <= len(ids):
        raise UsageError(f"{where} has no 'response_start' from 1 to {len(ids)}; correct or remove it")
    domain, temperature, index = row.get("domain", ""), row.get("temperature", 0.0), row.get("index", -1)
    if not isinstance(domain, str) or not _is_number(temperature) or type(index) is not int:
        raise UsageError(f"{where} has a 'domain', 'temperature' or 'index' of another type; correct or remove it")
    return Response(domain, float(temperature), start, tuple(ids), index)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
