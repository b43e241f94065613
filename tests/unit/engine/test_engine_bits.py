"""Logits do not depend on how tokens are split into passes, on the company of other rows, or on threads.

Greedy speculation equals greedy decoding exactly because of this and nothing else, so every comparison is of bits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_engine import SMALL, TinyEngine, make_engine

from trtllm_dspark.engine.base import TokenBatch
from trtllm_dspark.graph import WEIGHT_DTYPES

LENGTH = 330
MODELS = {
    "grouped": SMALL,
    "multi_head": replace(SMALL, num_kv_heads=4),
    "wide_heads": replace(SMALL, num_heads=4, num_kv_heads=2, head_dim=128, qk_norm=True),
}
CASES = [(dtype, model) for dtype in WEIGHT_DTYPES for model in MODELS]


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    dtype, model = request.param
    return make_engine(tmp_path_factory.mktemp("engine"), MODELS[model], weight_dtype=dtype)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, SMALL.vocab_size, (4, LENGTH))


@pytest.fixture(scope="module")
def whole(tiny: TinyEngine, tokens: np.ndarray) -> list[np.ndarray]:
    return [tiny.target(row)[0] for row in tokens]


def random_sizes(rng: np.random.Generator, total: int, largest: int) -> list[int]:
    sizes: list[int] = []
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(int(rng.integers(1, largest + 1)), left))
    return sizes


def test_single_token_passes_give_the_bits_of_one_pass(
    tiny: TinyEngine, tokens: np.ndarray, whole: list[np.ndarray]
) -> None:
    assert np.array_equal(tiny.chunks(tokens[0], [1] * LENGTH), whole[0])


@pytest.mark.parametrize("seed", range(3))
def test_random_chunks_in_any_slot_give_the_bits_of_one_pass(
    tiny: TinyEngine, tokens: np.ndarray, whole: list[np.ndarray], seed: int
) -> None:
    sizes = random_sizes(np.random.default_rng(seed), LENGTH, 40)
    assert np.array_equal(tiny.chunks(tokens[seed], sizes, slot=seed), whole[seed])


def test_ragged_batches_give_the_bits_of_each_request_alone(
    tiny: TinyEngine, tokens: np.ndarray, whole: list[np.ndarray]
) -> None:
    rng = np.random.default_rng(5)
    starts = np.zeros(4, np.int64)
    rows = np.array([200, 1, 60, 7])
    compared = 0
    while (starts + rows).max() <= LENGTH:
        packed = np.concatenate([tokens[r, s : s + n] for r, (s, n) in enumerate(zip(starts, rows, strict=True))])
        out = tiny.engine.verify(TokenBatch(packed, rows, starts.copy(), np.arange(rows.sum())))
        expected = np.concatenate([whole[r][s : s + n] for r, (s, n) in enumerate(zip(starts, rows, strict=True))])
        assert np.array_equal(out.logits, expected)
        compared += 1
        starts += rows
        rows = rng.integers(1, 9, 4)
    assert compared > 20


def test_two_threads_give_the_bits_of_one(
    tiny: TinyEngine, tokens: np.ndarray, whole: list[np.ndarray], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    dtype, model = request.node.callspec.params["tiny"]
    double = make_engine(tmp_path, MODELS[model], weight_dtype=dtype, num_threads=2)
    assert np.array_equal(double.chunks(tokens[0], [256, 8, 1, 1, 64]), whole[0][: 256 + 8 + 2 + 64])


def test_more_threads_than_kv_heads_are_not_used(
    tokens: np.ndarray, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one KV head of width 128 two threads would split its columns and change the sums of short passes only."""
    config = replace(SMALL, num_heads=2, num_kv_heads=1, head_dim=128)
    tiny = make_engine(tmp_path, config, num_threads=2)
    assert "1 instead of 2 threads" in caplog.text
    assert np.array_equal(tiny.chunks(tokens[0], [1] * LENGTH), tiny.target(tokens[0])[0])


def test_rejected_tokens_leave_no_trace(tiny: TinyEngine, tokens: np.ndarray, whole: list[np.ndarray]) -> None:
    """Tokens written and then overwritten from an earlier position, as after a rejection."""
    tiny.target(tokens[0, :100])
    tiny.target(tokens[1, :64], 100)
    assert np.array_equal(tiny.target(tokens[0, 100:140], 100)[0], whole[0][100:140])
