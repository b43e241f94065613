"""Growth, shrinkage and moves of the key and value caches, through an engine and alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_engine import SMALL, TinyEngine, make_engine, small_drafter

from trtllm_dspark.engine._cache import KvCache
from trtllm_dspark.engine.base import TokenBatch
from trtllm_dspark.errors import DeviceError


def fill(cache: KvCache, slot: int, start: int, count: int) -> None:
    """Write position + 1000 * slot into every array, as a pass would."""
    cache.prepare(slot, np.array([start]), count)
    values = np.arange(start, start + count, dtype=np.float32)[:, None] + 1000 * slot
    for array in cache.arrays.values():
        array[slot, :, start : start + count] = values
    cache.commit(slot, np.array([start + count]))


def holds(cache: KvCache, slot: int, count: int) -> bool:
    expected = np.arange(count, dtype=np.float32)[:, None] + 1000 * slot
    return all(np.array_equal(a[slot, h, :count], expected.repeat(4, 1)) for a in cache.arrays.values() for h in (0, 1))


@pytest.fixture
def cache() -> KvCache:
    return KvCache(num_layers=2, num_slots=4, num_kv_heads=2, head_dim=4, max_length=2000)


def test_growth_keeps_every_slot(cache: KvCache) -> None:
    fill(cache, 1, 0, 100)
    fill(cache, 2, 0, 1500)
    assert cache.length >= 1500
    assert cache.length % 64 == 0
    assert holds(cache, 1, 100)
    assert holds(cache, 2, 1500)
    assert not cache.arrays["k.0"][1, :, 100:].any()


def test_length_follows_down_and_long_slots_come_back(cache: KvCache) -> None:
    fill(cache, 2, 0, 1500)
    for step in range(60):
        fill(cache, 0, step, 1)
    assert cache.length < 500
    assert holds(cache, 0, 60)
    cache.prepare(2, np.array([1500]), 1)
    assert holds(cache, 2, 1500)
    assert holds(cache, 0, 60)


def test_slot_kept_aside_and_started_anew_forgets_its_past(cache: KvCache) -> None:
    fill(cache, 2, 0, 1500)
    for step in range(60):
        fill(cache, 0, step, 1)
    fill(cache, 2, 0, 10)
    assert cache.length < 500
    assert holds(cache, 2, 10)
    assert not cache.arrays["v.1"][2, :, 10:].any()


def test_alternating_long_and_short_passes_do_not_resize(cache: KvCache) -> None:
    fill(cache, 2, 0, 1500)
    generation = cache.generation
    for step in range(100):
        fill(cache, 0, step, 1)
        fill(cache, 2, 1500, 1)
    assert cache.generation == generation


def test_copy_slot_takes_tokens_kept_aside(cache: KvCache) -> None:
    fill(cache, 2, 0, 1500)
    for step in range(60):
        fill(cache, 0, step, 1)
    cache.copy_slot(2, 3, 1400)
    expected = np.arange(1400, dtype=np.float32) + 2000
    assert np.array_equal(cache.arrays["k.1"][3, 1, :1400, 0], expected)


def test_longer_than_the_limit_is_refused(cache: KvCache) -> None:
    with pytest.raises(DeviceError, match="2049 tokens"):
        cache.prepare(0, np.array([2000]), 49)


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


def test_growth_in_the_middle_of_a_batch_keeps_bits(tiny: TinyEngine) -> None:
    """One row outgrows the cache while another decodes; both give the bits they give alone."""
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


def test_idle_slots_are_not_resident(tmp_path: Path) -> None:
    """Caches of idle slots must not be touched: 4096 slots of 128 KiB would be half a gigabyte."""
    tiny = make_engine(tmp_path, max_batch_size=4096)
    before = resident_bytes()
    tiny.target(np.arange(20))
    assert resident_bytes() - before < 64 << 20
    assert sum(array.nbytes for array in tiny.engine._cache.arrays.values()) > 512 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
