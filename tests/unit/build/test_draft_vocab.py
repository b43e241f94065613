"""The reduced draft vocabulary: which tokens it keeps, and which count files it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trtllm_dspark.build.draft_vocab import choose_draft_vocab, read_token_counts
from trtllm_dspark.errors import ConfigError


def test_choose_keeps_most_frequent_and_special_tokens_sorted() -> None:
    counts = np.array([0, 9, 0, 5, 7, 0, 1, 0], np.int64)
    assert choose_draft_vocab(counts, 4, [7, 2]).tolist() == [1, 2, 4, 7]


def test_choose_equal_counts_prefers_lower_id() -> None:
    assert choose_draft_vocab(np.array([1, 3, 3, 3, 0]), 2, []).tolist() == [1, 2]


def test_choose_special_token_that_is_frequent_counts_once() -> None:
    assert choose_draft_vocab(np.array([4, 3, 2, 1]), 3, [0, 0]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [4, 5])
def test_choose_size_not_below_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="must be below the target's vocabulary of 4"):
        choose_draft_vocab(np.zeros(4, np.int64), size, [])


def test_choose_size_below_special_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold the 3 special tokens"):
        choose_draft_vocab(np.zeros(9, np.int64), 2, [1, 2, 3])


def write(path: Path, **changes: object) -> Path:
    raw = {"schema": "trtllm_dspark.token_counts", "schema_version": 1, "vocab_size": 4, "counts": [[1, 5], [3, 2]]}
    path.write_text(json.dumps({**raw, **changes}))
    return path


def test_read_counts_by_token(tmp_path: Path) -> None:
    assert read_token_counts(write(tmp_path / "c.json"), 4).tolist() == [0, 5, 0, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "x"}, "is no token counts file"),
        ({"schema_version": 9}, "schema version 9"),
        ({"vocab_size": 5}, "counts a vocabulary of 5 tokens, the target has 4"),
        ({"counts": [[4, 1]]}, "ids below 4"),
        ({"counts": [[-1, 1]]}, "ids below 4"),
        ({"counts": [[0, -1]]}, "counts of at least 0"),
        ({"counts": [[0, 1.5]]}, "pairs"),
        ({"counts": [[0, True]]}, "pairs"),
        ({"counts": {"0": 1}}, "pairs"),
    ],
)
def test_read_wrong_file_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_token_counts(write(tmp_path / "c.json", **changes), 4)


def test_read_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token_counts(tmp_path / "none.json", 4)
    for text in ("[", "[" * 100_000):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ConfigError, match="is not valid JSON"):
            read_token_counts(tmp_path / "broken.json", 4)
    (tmp_path / "binary.json").write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_token_counts(tmp_path / "binary.json", 4)
