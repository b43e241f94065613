"""Large tables are widened and compared in pieces: memory holds the float32 values once, or less."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import QuantizationType, write_gguf
from helpers.tiny_models import write_drafter, write_target

from trtllm_dspark.checkpoint import load_drafter, load_target, share_equal_tensors, tie_equal_head
from trtllm_dspark.checkpoint.arrays import LazyArray, equal_values
from trtllm_dspark.checkpoint.safetensors_io import read_file, write_file

VOCAB, WIDTH = 200_000, 64
NUM_BYTES = VOCAB * WIDTH * 4


def peak(work: Callable[[], object]) -> int:
    """Return the largest number of bytes that were allocated at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_widened_table_is_in_memory_once(tmp_path: Path, dtype: str) -> None:
    bits = np.arange(VOCAB * WIDTH, dtype=np.uint32).reshape(VOCAB, WIDTH) % 0x7000
    table = {"BF16": bits.astype(np.uint16), "F16": bits.astype(np.uint16).view(np.float16), "F32": bits.view("<f4")}
    narrow = frozenset({"x"} if dtype == "BF16" else ())
    write_file(tmp_path / "x.safetensors", {"x": table[dtype]}, bfloat16=narrow)
    tensor = read_file(tmp_path / "x.safetensors")["x"]
    assert peak(tensor.read) < 1.3 * NUM_BYTES
    exact = {"BF16": (bits << 16).view(np.float32), "F16": table["F16"].astype(np.float32), "F32": table["F32"]}[dtype]
    np.testing.assert_array_equal(tensor.read(), exact)
    np.testing.assert_array_equal(tensor.read_rows(70_000, 70_003), exact[70_000:70_003])
    assert tensor.read_rows(5, 5).shape == (0, WIDTH)


def test_copied_tables_are_found_in_a_fraction_of_their_memory(tmp_path: Path) -> None:
    """A drafter's copies of its target's tables, and a target's copy of its own embedding, stored in other types."""
    target = load_target(write_target(tmp_path / "target", vocab_size=VOCAB, dtype="BF16"))
    source = {name: entry.read() for name, entry in read_file(tmp_path / "target" / "model.safetensors").items()}
    write_drafter(tmp_path / "drafter", vocab_size=VOCAB, markov_head="none")
    stored = {name: entry.read() for name, entry in read_file(tmp_path / "drafter" / "model.safetensors").items()}
    stored |= {"embed_tokens.weight": source["model.embed_tokens.weight"], "lm_head.weight": source["lm_head.weight"]}
    write_file(tmp_path / "drafter" / "model.safetensors", stored)
    drafter = load_drafter(tmp_path / "drafter", target.config)
    assert not drafter.shares_embedding
    assert peak(lambda: share_equal_tensors(drafter, target)) < 0.5 * NUM_BYTES
    shared = share_equal_tensors(drafter, target)
    assert shared.shares_embedding
    assert shared.shares_lm_head

    source["lm_head.weight"] = source["model.embed_tokens.weight"]
    write_file(tmp_path / "target" / "model.safetensors", source)
    assert peak(lambda: tie_equal_head(load_target(tmp_path / "target"))) < 0.5 * NUM_BYTES
    assert tie_equal_head(load_target(tmp_path / "target")).config.tie_word_embeddings


def test_tied_checkpoint_with_a_stored_head_is_compared_in_a_fraction_of_its_memory(tmp_path: Path) -> None:
    path = write_target(tmp_path, vocab_size=VOCAB, tie_word_embeddings=True) / "model.safetensors"
    tensors = {name: entry.read() for name, entry in read_file(path).items()}
    write_file(path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert peak(lambda: load_target(tmp_path)) < 0.5 * NUM_BYTES


def entry(values: np.ndarray, *, by_rows: bool) -> LazyArray:
    rows = (lambda begin, end: values[begin:end]) if by_rows else None
    return LazyArray("x", values.shape, lambda: values, rows)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("shape", [(), (7,), (0, 5), (3000, 700)])
def test_one_other_value_anywhere_is_a_difference(shape: tuple[int, ...], by_rows: bool) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    one = entry(values, by_rows=by_rows and shape != ())
    assert equal_values(one, entry(values.copy(), by_rows=True) if shape else entry(values.copy(), by_rows=False))
    for position in {0, values.size // 2, values.size - 1} if values.size else ():
        changed = values.copy()
        changed.reshape(-1)[position] += 1
        assert not equal_values(one, entry(changed, by_rows=False))
    assert not equal_values(one, entry(np.zeros((*shape, 1), np.float32), by_rows=False))


def test_reading_stops_at_the_first_difference() -> None:
    asked: list[int] = []

    def rows(begin: int, end: int) -> np.ndarray:
        asked.append(begin)
        return np.zeros((end - begin, 1 << 20), np.float32)

    zeros = LazyArray("x", (5, 1 << 20), lambda: np.zeros(0, np.float32), rows)
    ones = replace(zeros, load_rows=lambda begin, end: np.ones((end - begin, 1 << 20), np.float32))
    assert not equal_values(zeros, ones)
    assert asked == [0]
    assert equal_values(zeros, zeros)


@pytest.mark.parametrize("quantisation", ["Q4_0", "F16"])
def test_rows_of_a_gguf_table_are_those_of_the_whole(tmp_path: Path, quantisation: str) -> None:
    source = load_target(write_target(tmp_path / "source"))
    arrays = load_target(write_gguf(tmp_path / "m.gguf", source, quantisation=QuantizationType[quantisation])).arrays
    rows = arrays.entry("embed.weight").load_rows
    assert rows is not None
    np.testing.assert_array_equal(rows(11, 90), arrays["embed.weight"][11:90])
    # Its rows are put in another order: only the whole can be converted.
    assert arrays.entry("layers.0.q.weight").load_rows is None
