"""Random inputs of the core, and the levels of its instruction sets this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.errors import NativeError
from trtllm_dspark.reference.bits import chain, heads


def available_levels() -> list[str]:
    """Return the instruction sets of this machine, portable first."""
    best, levels = _core.simd_level(), []
    for level in ("portable", "avx2", "avx512"):
        try:
            _core.set_simd_level(level)
        except NativeError:
            continue
        levels.append(level)
    _core.set_simd_level(best)
    return levels


@contextmanager
def simd(level: str) -> Iterator[None]:
    """Use one instruction set inside the block."""
    best = _core.simd_level()
    _core.set_simd_level(level)
    try:
        yield
    finally:
        _core.set_simd_level(best)


@dataclass(frozen=True)
class HeadCase:
    """One set of head weights: `arguments` for `_core.DraftHeads`, `twin` for the reference."""

    vocab: int
    draft_vocab: int
    hidden: int
    arguments: dict[str, Any]

    def native(self) -> _core.DraftHeads:
        return _core.DraftHeads(vocab_size=self.vocab, draft_vocab_size=self.draft_vocab, **self.arguments)

    def twin(self) -> heads.Heads:
        arguments = dict(self.arguments)
        arguments.pop("confidence_with_markov", None)
        return heads.Heads(**arguments)


def head_case(
    rng: np.random.Generator,
    kind: str,
    *,
    int8: bool = False,
    vocab: int = 200,
    draft_vocab: int | None = None,
    rank: int = 9,
    hidden: int = 21,
    with_markov: bool = True,
    with_bias: bool = True,
) -> HeadCase:
    """Return random weights of one kind; `draft_vocab` below `vocab` makes a shuffled d2t."""
    size = vocab if draft_vocab is None else draft_vocab
    arguments: dict[str, Any] = {"kind": kind}
    if kind != "none":
        if int8:
            arguments["w1"] = rng.integers(-127, 128, (vocab, rank), np.int8)
            arguments["w2"] = rng.integers(-127, 128, (size, rank), np.int8)
            arguments["w1_scale"] = rng.uniform(0.001, 0.02, vocab).astype(np.float32)
            arguments["w2_scale"] = rng.uniform(0.001, 0.02, size).astype(np.float32)
        else:
            arguments["w1"] = normal(rng, (vocab, rank))
            arguments["w2"] = normal(rng, (size, rank))
    if kind == "gated":
        arguments["gate_weight"] = normal(rng, (rank, hidden + rank), 0.3)
    if kind == "rnn":
        arguments["rnn_weight"] = normal(rng, (3 * rank, 2 * rank + hidden), 0.3)
    if kind in ("gated", "rnn") and with_bias:
        name = "gate_bias" if kind == "gated" else "rnn_bias"
        arguments[name] = normal(rng, (rank if kind == "gated" else 3 * rank,), 0.3)
    with_markov = with_markov and kind != "none"
    arguments["confidence_weight"] = normal(rng, (hidden + (rank if with_markov else 0),), 0.3)
    arguments["confidence_with_markov"] = with_markov
    if with_bias:
        arguments["confidence_bias"] = normal(rng, (1,))
    if draft_vocab is not None:
        arguments["d2t"] = rng.permutation(vocab)[:draft_vocab].astype(np.int64)
    return HeadCase(vocab, size, hidden, arguments)


def normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    """Return float32 normal numbers."""
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def logit_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 logits with ties, both zeros, far tails and -inf among them."""
    rows = normal(rng, shape, 3.0)
    rows = np.where(rng.random(shape) < 0.2, np.round(rows), rows)
    rows = np.where(rng.random(shape) < 0.05, np.float32(-0.0), rows)
    rows = np.where(rng.random(shape) < 0.05, rows - np.float32(40), rows)
    rows = np.where(rng.random(shape) < 0.05, np.float32(-np.inf), rows)
    rows[..., 0] = np.where(np.isneginf(rows).all(axis=-1), np.float32(1), rows[..., 0])
    return np.ascontiguousarray(rows, np.float32)


def sampling(rng: np.random.Generator, num_requests: int) -> tuple[_core.Sampling, chain.Sampling]:
    """Return mixed sampling parameters: greedy, plain, top-k, top-p and both, for the core and for the twin."""
    temperature = rng.choice([0.0, 9e-6, 0.05, 0.7, 1.0, 1.7], num_requests).astype(np.float32)
    seed = rng.integers(0, 2**64, num_requests, np.uint64)
    top_k = rng.choice([0, 0, 1, 2, 17, 10**9], num_requests).astype(np.int64)
    top_p = rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 1e-6], num_requests).astype(np.float32)
    native = _core.Sampling(temperature, seed, top_k, top_p)
    return native, chain.Sampling(temperature.tolist(), seed.tolist(), top_k.tolist(), top_p.tolist())
