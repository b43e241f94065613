"""Key and value caches: moved slots, rows of very different lengths, memory that nobody reached."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_engine import SMALL, TinyEngine, make_engine, small_drafter

from trtllm_dspark.engine._session import MAX_BINDINGS
from trtllm_dspark.engine.base import TokenBatch


@pytest.fixture
def tiny(tmp_path: Path) -> TinyEngine:
    return make_engine(tmp_path, SMALL, small_drafter())


def test_moved_request_continues_with_the_same_bits(tiny: TinyEngine) -> None:
    tokens = np.random.default_rng(1).integers(0, SMALL.vocab_size, 300)
    whole, features = tiny.target(tokens, slot=3)
    tiny.absorb(features[:280], slot=3)
    stay = tiny.engine.draft_block(np.array([5]), np.array([280]), first_slot=3).base_logits
    tiny.engine.copy_slot(3, 0, num_tokens=290, num_context=280)
    assert np.array_equal(tiny.target(tokens[290:], 290)[0], whole[290:])
    assert np.array_equal(tiny.engine.draft_block(np.array([5]), np.array([280])).base_logits, stay)


def test_short_and_long_rows_together_keep_their_bits(tiny: TinyEngine) -> None:
    """Attention of a short row reads as far as the longest row reaches; both give the bits they give alone."""
    tokens = np.random.default_rng(1).integers(0, SMALL.vocab_size, (2, 500))
    short, long = tiny.target(tokens[0, :40])[0], tiny.target(tokens[1])[0]
    fresh = np.zeros(2, np.int64)
    tiny.engine.verify(TokenBatch(np.concatenate([tokens[0, :10], tokens[1, :200]]), np.array([10, 200]), fresh, fresh))
    starts = np.array([10, 200])
    for _ in range(30):
        rows = np.array([1, 10])
        packed = np.concatenate([tokens[r, s : s + n] for r, (s, n) in enumerate(zip(starts, rows, strict=True))])
        out = tiny.engine.verify(TokenBatch(packed, rows, starts.copy(), np.arange(11)))
        assert np.array_equal(out.logits[0], short[starts[0]])
        assert np.array_equal(out.logits[1:], long[starts[1] : starts[1] + 10])
        starts += rows


def test_caches_are_updated_in_place(tiny: TinyEngine, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime warns where TensorScatter has to copy a cache."""
    features = tiny.target(np.arange(20), slot=1)[1]
    tiny.absorb(features, slot=1)
    tiny.engine.draft_block(np.array([5]), np.array([20]), first_slot=1)
    assert "in-place" not in capfd.readouterr().err
    caches = tiny.engine._cache.arrays.values()
    assert all(array[1, :, :20].all(axis=-1).all() and not array[[0, 2, 3]].any() for array in caches)


def test_bindings_of_slot_ranges_are_bounded_and_come_back_right(tmp_path: Path) -> None:
    """16 slots have 136 ranges: each is run, then each once more after it was let go."""
    tiny = make_engine(tmp_path, max_batch_size=16)
    tokens = np.random.default_rng(1).integers(0, SMALL.vocab_size, (16, 9))
    alone = [tiny.target(row, slot=slot)[0][-1] for slot, row in enumerate(tokens)]
    bindings = tiny.engine._target._bindings
    ranges = [(first, count) for count in range(1, 17) for first in range(17 - count)]
    assert len(ranges) > 2 * MAX_BINDINGS
    for first, count in ranges * 2:
        last, ends = tokens[first : first + count, -1], np.full(count, 8)
        batch = TokenBatch(last, np.ones(count, np.int64), ends, np.arange(count), first)
        assert np.array_equal(tiny.engine.verify(batch).logits, alone[first : first + count])
        assert len(bindings) <= MAX_BINDINGS
    # What is used stays: the range of all slots, beside all others.
    for first, count in ranges:
        kept = tiny.engine._target._binding(0, 16)
        tiny.engine._target._binding(first, count)
        assert tiny.engine._target._binding(0, 16) is kept
    assert list(bindings)[-1] == (0, 16)


def test_unused_lengths_and_idle_slots_are_not_resident(tmp_path: Path) -> None:
    tiny = make_engine(tmp_path, max_batch_size=4096)
    before = resident_bytes()
    tiny.target(np.arange(20))
    assert resident_bytes() - before < 64 << 20
    assert sum(array.nbytes for array in tiny.engine._cache.arrays.values()) > 1 << 30


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
