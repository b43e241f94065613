"""Logit rows as integer masses, and picks from them, against the NumPy twins on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.core_cases import available_levels, logit_rows, simd

from trtllm_dspark import _core
from trtllm_dspark.reference.bits import rows

SIZES = [1, 2, 7, 15, 16, 17, 63, 64, 65, 300, 1023, 1024, 1025, 5000]
FILTERS = [(0, 1.0), (1, 1.0), (5, 1.0), (40, 0.9), (0, 0.999), (0, 0.5), (0, 1e-6), (3000, 0.97)]


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("size", SIZES)
def test_row_masses_equal_twin(level: str, size: int) -> None:
    rng = np.random.default_rng(size)
    with simd(level):
        for temperature in (1e-5, 0.3, 1.0, 8.0):
            for top_k, top_p in FILTERS:
                row = logit_rows(rng, (size,))
                got = _core.row_masses(row, temperature, top_k, top_p)
                expected = rows.row_masses(row, temperature, top_k, top_p)
                np.testing.assert_array_equal(got, expected, f"{temperature=} {top_k=} {top_p=}")


@pytest.mark.parametrize("level", available_levels())
def test_row_masses_of_equal_logits_keep_every_tie(level: str) -> None:
    row = np.full(700, -2.5, np.float32)
    with simd(level):
        for top_k, top_p in [(1, 1.0), (0, 0.1), (3, 0.5)]:
            np.testing.assert_array_equal(_core.row_masses(row, 1.0, top_k, top_p), np.full(700, 2**40, np.uint64))


@pytest.mark.parametrize("level", available_levels())
def test_row_masses_of_large_rows_equal_twin(level: str) -> None:
    rng = np.random.default_rng(5)
    row = rng.standard_normal(49152, dtype=np.float32) * np.float32(4)
    with simd(level):
        for top_k, top_p in [(0, 1.0), (50, 1.0), (0, 0.95), (20_000, 0.9)]:
            got = _core.row_masses(row, 0.8, top_k, top_p)
            np.testing.assert_array_equal(got, rows.row_masses(row, 0.8, top_k, top_p), f"{top_k=} {top_p=}")


def test_pick_equals_twin_and_inverts_the_prefix_sum() -> None:
    rng = np.random.default_rng(7)
    for size in SIZES:
        masses = rng.integers(0, 2**40, size, np.uint64) * (rng.random(size) < 0.5)
        masses = masses.astype(np.uint64)
        for bits in [0, 2**64 - 1, *rng.integers(0, 2**64, 20, np.uint64).tolist()]:
            assert _core.pick(masses, bits) == rows.pick(masses, bits), f"{size=} {bits=}"


def test_pick_of_no_mass_is_minus_one() -> None:
    assert _core.pick(np.zeros(5, np.uint64), 1) == -1
    assert _core.coupled_pick(np.zeros(5, np.uint64), 1, 1) == -1


def test_coupled_pick_equals_twin() -> None:
    rng = np.random.default_rng(8)
    for size in (1, 3, 1024, 1030, 2100):
        masses = (rng.integers(0, 2**40, size, np.uint64) * (rng.random(size) < 0.6)).astype(np.uint64)
        masses[0] = 1
        for _ in range(5):
            seed, position = int(rng.integers(0, 2**63)), int(rng.integers(0, 2**40))
            assert _core.coupled_pick(masses, seed, position) == rows.coupled_pick(masses, seed, position)


def test_residual_masses_and_accept_test_equal_twins() -> None:
    rng = np.random.default_rng(9)
    for _ in range(200):
        size = int(rng.integers(1, 40))
        target = rng.integers(0, 2**40 + 1, size, np.uint64)
        draft = rng.integers(0, 2**40 + 1, size, np.uint64)
        target[rng.integers(size)] = draft[rng.integers(size)] = 2**40
        np.testing.assert_array_equal(_core.residual_masses(target, draft), rows.residual_masses(target, draft))
        token, bits = int(rng.integers(size)), int(rng.integers(0, 2**64, dtype=np.uint64))
        arguments = (bits, int(target[token]), int(target.sum()), int(draft[token]), int(draft.sum()))
        assert _core.accept_test(*arguments) == rows.accept_test(*arguments)


def test_residual_of_equal_rows_is_empty() -> None:
    masses = np.array([3, 2**40, 5], np.uint64)
    assert not _core.residual_masses(masses, masses).any()
