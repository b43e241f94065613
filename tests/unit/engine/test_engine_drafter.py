"""The drafter's two passes against the reference forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_engine import SMALL, TinyEngine, make_engine, small_drafter

from trtllm_dspark.engine.base import ContextBatch
from trtllm_dspark.graph import WEIGHT_DTYPES, WeightDtype
from trtllm_dspark.reference.models import BlockForward, drafter_block, drafter_context

KEPT = np.array([2, 3, 5, 7, 11, 13, 60, 96])


def random_features(tiny: TinyEngine, num_rows: int, seed: int = 7) -> np.ndarray:
    assert tiny.drafter is not None
    return np.random.default_rng(seed).normal(size=(num_rows, tiny.drafter.feature_size)).astype(np.float32)


def expected_block(tiny: TinyEngine, features: np.ndarray, anchor: int) -> BlockForward:
    assert tiny.drafter is not None
    assert tiny.drafter_arrays is not None
    context = drafter_context(tiny.drafter, tiny.drafter_arrays, features)
    return drafter_block(
        tiny.drafter,
        tiny.drafter_arrays,
        context,
        anchor,
        target_arrays=tiny.arrays,
        draft_token_ids=tiny.draft_token_ids,
    )


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("own_tables", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_block_float32_equals_reference(own_tables: bool, kept: np.ndarray | None, tied: bool, tmp_path: Path) -> None:
    target = replace(SMALL, tie_word_embeddings=tied)
    tiny = make_engine(tmp_path, target, small_drafter(target), own_tables=own_tables, draft_token_ids=kept)
    features = random_features(tiny, 40)
    tiny.absorb(features)
    out = tiny.engine.draft_block(np.array([9]), np.array([40]))
    expected = expected_block(tiny, features, 9)
    assert_close(out.base_logits[0], expected.base_logits)
    assert_close(out.hidden[0], expected.hidden)


@pytest.mark.parametrize("weight_dtype", ["int8", "w8a8"])
def test_block_8bit_stays_near_reference(weight_dtype: WeightDtype, tmp_path: Path) -> None:
    tiny = make_engine(tmp_path, SMALL, small_drafter(), weight_dtype=weight_dtype)
    features = random_features(tiny, 40)
    tiny.absorb(features)
    out = tiny.engine.draft_block(np.array([9]), np.array([40])).base_logits[0]
    expected = expected_block(tiny, features, 9).base_logits
    assert 0 < np.sqrt(np.mean((out - expected) ** 2) / np.mean(expected**2)) < 0.3


def test_block_after_a_context_of_one_token_equals_reference(tmp_path: Path) -> None:
    tiny = make_engine(tmp_path, SMALL, small_drafter())
    features = random_features(tiny, 1)
    tiny.absorb(features)
    out = tiny.engine.draft_block(np.array([9]), np.array([1]))
    assert_close(out.base_logits[0], expected_block(tiny, features, 9).base_logits)


def test_shorter_draft_keeps_the_trained_block(tmp_path: Path) -> None:
    """All slots of the block take part in attention; only the logits of the first ones are computed."""
    tiny = make_engine(tmp_path, SMALL, small_drafter(), max_draft_len=2)
    features = random_features(tiny, 10)
    tiny.absorb(features)
    out = tiny.engine.draft_block(np.array([9]), np.array([10]))
    expected = expected_block(tiny, features, 9)
    assert_close(out.base_logits[0], expected.base_logits[:2])
    assert_close(out.hidden[0], expected.hidden[:2])


def test_ragged_rounds_with_empty_rows_equal_reference(tmp_path: Path) -> None:
    """Three requests whose contexts grow by 0 to 6 tokens a round, a block of each in between."""
    tiny = make_engine(tmp_path, SMALL, small_drafter())
    features = [random_features(tiny, 60, seed) for seed in range(3)]
    rng = np.random.default_rng(4)
    lengths = np.zeros(3, np.int64)
    for step in range(8):
        rows = rng.integers(0, 7, 3) if step else np.array([1, 6, 2])
        new = [f[s : s + n] for f, s, n in zip(features, lengths, rows, strict=True)]
        tiny.engine.absorb(ContextBatch(np.concatenate(new), rows, lengths.copy(), first_slot=1))
        lengths += rows
        out = tiny.engine.draft_block(np.array([4, 5, 6]), lengths, first_slot=1)
        for row, anchor in enumerate((4, 5, 6)):
            expected = expected_block(tiny, features[row][: lengths[row]], anchor)
            assert_close(out.base_logits[row], expected.base_logits)


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_block_bits_do_not_depend_on_company_or_absorption(weight_dtype: WeightDtype, tmp_path: Path) -> None:
    tiny = make_engine(tmp_path, SMALL, small_drafter(), weight_dtype=weight_dtype)
    features = [random_features(tiny, 300, seed) for seed in range(3)]
    alone = []
    for f in features:
        tiny.absorb(f)
        alone.append(tiny.engine.draft_block(np.array([8]), np.array([300])))
    rows, starts = np.array([299, 150, 1]), np.zeros(3, np.int64)
    tiny.engine.absorb(ContextBatch(np.concatenate([f[:n] for f, n in zip(features, rows, strict=True)]), rows, starts))
    tiny.engine.draft_block(np.array([1, 2, 3]), rows)
    rest = np.concatenate([f[n:] for f, n in zip(features, rows, strict=True)])
    tiny.engine.absorb(ContextBatch(rest, 300 - rows, rows))
    together = tiny.engine.draft_block(np.array([8, 8, 8]), np.array([300, 300, 300]))
    for row, single in enumerate(alone):
        assert np.array_equal(together.base_logits[row], single.base_logits[0])
        assert np.array_equal(together.hidden[row], single.hidden[0])


def test_shared_tables_are_not_stored_again(tmp_path: Path) -> None:
    make_engine(tmp_path, SMALL, small_drafter(), weight_dtype="int8")
    size = (tmp_path / "drafter_block.onnx.data").stat().st_size
    own = tmp_path / "own"
    own.mkdir()
    make_engine(own, SMALL, small_drafter(), weight_dtype="int8", own_tables=True)
    larger = (own / "drafter_block.onnx.data").stat().st_size
    assert larger - size >= 2 * SMALL.vocab_size * SMALL.hidden_size
