"""Pinned functions of the core against their NumPy twins, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark import _core
from trtllm_dspark.reference.bits import float32, philox


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    different = np.flatnonzero(got.view(np.uint32) != expected.view(np.uint32))
    assert different.size == 0, f"{different.size} differ, first at {different[0]}: {got[different[0]]!r}"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def test_exp2_equals_twin_and_is_within_an_ulp(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-126, 126, 100_000), np.arange(-126, 126.5, 0.5)]).astype(np.float32)
    got = _core.exp2_exact(x)
    assert_same_bits(got, float32.exp2(x))
    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(got - exact) / np.spacing(exact.astype(np.float32)).astype(np.float64)) < 1.0


def test_exponential_equals_twin_and_is_relatively_exact(rng: np.random.Generator) -> None:
    edges = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    words = np.concatenate([rng.integers(0, 2**32, 100_000), rng.integers(0, 2**12, 1000), edges]).astype(np.uint32)
    got = _core.exponential_exact(words)
    assert_same_bits(got, float32.exponential(words))
    exact = -np.log1p(-(words.astype(np.longdouble) + 0.5) / 2.0**32) / np.log(np.longdouble(2))
    assert np.max(np.abs(got / exact - 1)) < 4e-7  # about 3 ulp: one division, one polynomial, one addition


@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_sigmoid_and_tanh_equal_twins(rng: np.random.Generator, name: str) -> None:
    x = np.concatenate([rng.normal(0, 20, 50_000), [0.0, -0.0, 1e30, -1e30, np.inf, -np.inf, np.nan]]).astype(
        np.float32
    )
    got = getattr(_core, f"{name}_exact")(x)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = getattr(float32, name)(x)
    assert np.isnan(got[-1])
    assert np.isnan(expected[-1])
    assert_same_bits(got[:-1], expected[:-1])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], words: tuple[int, ...]) -> None:
    assert _core.philox_raw(counter, key) == words


def test_philox_keying_equals_twin(rng: np.random.Generator) -> None:
    for _ in range(200):
        seed, position = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(0, 2**55))
        stream, block = int(rng.integers(0, 6)), int(rng.integers(0, 2**32))
        assert _core.philox(seed, position, stream, block) == tuple(philox.philox(seed, position, stream, block))
