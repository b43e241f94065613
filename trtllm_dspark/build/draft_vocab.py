"""Choose the reduced vocabulary that the drafter proposes from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.errors import ConfigError

COUNTS_SCHEMA = "trtllm_dspark.token_counts"
COUNTS_SCHEMA_VERSION = 1


def read_token_counts(path: Path, vocab_size: int) -> NDArray[np.int64]:
    """Read how often the target emitted each token.

    Args:
        path: token counts file (docs/file_formats.md).
        vocab_size: V of the target the counts must belong to.

    Returns:
        [V] int64, occurrences by token id.

    Raises:
        ConfigError: no such file, not a counts file, or counts of another vocabulary.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--draft_vocab_counts {path} cannot be read ({error.strerror}); give a counts file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--draft_vocab_counts {path} is not valid JSON ({error}); give a counts file") from error
    if not isinstance(raw, dict) or raw.get("schema") != COUNTS_SCHEMA:
        raise ConfigError(f"--draft_vocab_counts {path} is no token counts file; its format is in docs/file_formats.md")
    if raw.get("schema_version") != COUNTS_SCHEMA_VERSION:
        raise ConfigError(
            f"--draft_vocab_counts {path} has schema version {raw.get('schema_version')!r}, "
            f"this version reads {COUNTS_SCHEMA_VERSION}; write it again"
        )
    pairs = raw.get("counts")
    if raw.get("vocab_size") != vocab_size:
        raise ConfigError(
            f"--draft_vocab_counts {path} counts a vocabulary of {raw.get('vocab_size')!r} tokens, the target has "
            f"{vocab_size}; count with the target's own tokenizer"
        )
    if not isinstance(pairs, list) or not all(_is_pair(pair, vocab_size) for pair in pairs):
        raise ConfigError(
            f"--draft_vocab_counts {path}: 'counts' must list [token id, count] pairs with ids below {vocab_size} and "
            "counts of at least 0; its format is in docs/file_formats.md"
        )
    counts = np.zeros(vocab_size, np.int64)
    for token, count in pairs:
        counts[token] += count
    return counts


def _is_pair(pair: object, vocab_size: int) -> bool:
    if not isinstance(pair, list) or len(pair) != 2 or any(type(value) is not int for value in pair):
        return False
    return bool(0 <= pair[0] < vocab_size and 0 <= pair[1] < 2**53)


def choose_draft_vocab(counts: NDArray[np.int64], size: int, always: Iterable[int]) -> NDArray[np.int64]:
    """Pick the most frequent tokens, with some that are always kept.

    Equal counts are decided for the lower id, which in a byte-pair vocabulary is the earlier, shorter merge.

    Args:
        counts: [V] int64, occurrences by token id.
        size: Vd, tokens to keep.
        always: ids kept whatever their count: end-of-sequence and special tokens.

    Returns:
        [Vd] int64, ascending ids of the target's vocabulary: `d2t`.

    Raises:
        ConfigError: `size` is not below V, or smaller than the tokens that are always kept.
    """
    forced = np.unique(np.asarray(list(always), np.int64))
    if not size < counts.size:
        raise ConfigError(
            f"--draft_vocab_size {size} must be below the target's vocabulary of {counts.size} tokens; "
            "leave it out to keep the whole vocabulary"
        )
    if size < forced.size:
        raise ConfigError(f"--draft_vocab_size {size} cannot hold the {forced.size} special tokens; raise it")
    ranked = np.argsort(-counts, kind="stable")
    ranked = ranked[~np.isin(ranked, forced)]
    return np.sort(np.concatenate([forced, ranked[: size - forced.size]])).astype(np.int64)
