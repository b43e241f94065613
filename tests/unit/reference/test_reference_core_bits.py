"""The twins in `reference.bits` and the core give the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.random_schedules import random_cases

from trtllm_dspark import _core
from trtllm_dspark.reference import packing
from trtllm_dspark.reference.bits import acceptance, chain, float32, heads, philox, rows, schedule


@pytest.fixture(params=["portable", "best"])
def simd(request: pytest.FixtureRequest) -> Any:
    """Run the test on the portable bodies and on the best ones this machine has."""
    best = _core.simd_level()
    if request.param == "portable":
        _core.set_simd_level("portable")
    yield request.param
    _core.set_simd_level(best)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Compare bits, so that NaN equals NaN and -0 differs from +0."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def test_philox_words_are_equal() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        seed, position = int(rng.integers(0, 2**63)) * 2 + 1, int(rng.integers(0, 2**55))
        stream, block = int(rng.integers(0, 6)), int(rng.integers(0, 2**20))
        assert _core.philox(seed, position, stream, block) == philox.philox(seed, position, stream, block)
        raw = rng.integers(0, 2**32, 6).tolist()
        assert _core.philox_raw(raw[:4], raw[4:]) == philox.philox_raw(raw[:4], raw[4:])


def test_elementary_functions_are_equal() -> None:
    rng = np.random.default_rng(1)
    z = np.concatenate([rng.normal(size=20000) * 8, [0.0, -0.0, 1e-30, 300, -300, np.inf, -np.inf, np.nan]])
    z = z.astype(np.float32)
    assert same(_core.exp2_exact(np.clip(z[:20000], -126, 126)), float32.exp2(np.clip(z[:20000], -126, 126)))
    assert np.array_equal(_core.sigmoid_exact(z), float32.sigmoid(z), equal_nan=True)
    assert np.array_equal(_core.tanh_exact(z), float32.tanh(z), equal_nan=True)
    words = np.concatenate([rng.integers(0, 2**32, 20000), 2 ** np.arange(32), 2**32 - 2 ** np.arange(32), [0]])
    words = (words % 2**32).astype(np.uint32)
    assert same(_core.exponential_exact(words), float32.exponential(words))


ROWS = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.9), (0.2, 50, 0.3), (1.0, 3000, 0.999), (2.0, 1, 1.0), (0.05, 0, 0.01)]


@pytest.mark.parametrize("vocab", [3, 1024, 1025, 3000])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), ROWS)
def test_row_masses_and_picks_are_equal(simd: str, vocab: int, temperature: float, top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(vocab)
    for decimals in (1, 7):  # coarse logits tie
        logits = np.round(rng.normal(size=vocab) * 4, decimals).astype(np.float32)
        logits[rng.integers(0, vocab, vocab // 3)] = -np.inf
        logits[rng.integers(0, vocab)] = -0.0
        own = rows.row_masses(logits, temperature, top_k, top_p)
        assert same(_core.row_masses(logits, temperature, top_k, top_p), own)
        for bits in [0, 2**64 - 1, *(int(b) * 2 + 1 for b in rng.integers(0, 2**63, 20))]:
            assert _core.pick(own, bits) == rows.pick(own, bits)
        for seed in range(8):
            assert _core.coupled_pick(own, seed, 77) == rows.coupled_pick(own, seed, 77)
        other = rows.row_masses(rng.normal(size=vocab).astype(np.float32), 1.0)
        assert same(_core.residual_masses(own, other), rows.residual_masses(own, other))
        assert same(_core.residual_masses(other, own), rows.residual_masses(other, own))


def test_accept_tests_are_equal() -> None:
    rng = np.random.default_rng(2)
    for _ in range(3000):
        masses = [int(m) for m in rng.integers(1, 2 ** int(rng.integers(2, 41)), 4)]
        target, draft = min(masses[:2]), min(masses[2:])
        args = (target, max(masses[:2]), draft, max(masses[2:]))
        ratio = (args[0] / args[1]) / (args[2] / args[3])
        near = min(2**64 - 1, max(0, int(ratio * 2**64))) if ratio < 1 else 2**64 - 1
        for bits in (near, max(0, near - 2**11), min(2**64 - 1, near + 2**11), int(rng.integers(0, 2**63)) * 2):
            assert _core.accept_test(bits, *args) == rows.accept_test(bits, *args)


def random_heads(
    kind: str, dtype: str, vocab: int, draft_vocab: int, rank: int, size: int, seed: int
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def real(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    weights: dict[str, Any] = {"confidence_weight": real(size + (rank if kind != "none" else 0))}
    if kind != "none" and dtype == "int8":
        weights |= {"w1": rng.integers(-127, 128, (vocab, rank)).astype(np.int8)}
        weights |= {"w2": rng.integers(-127, 128, (draft_vocab, rank)).astype(np.int8)}
        weights |= {"w1_scale": np.abs(real(vocab)) / 100, "w2_scale": np.abs(real(draft_vocab)) / 100}
    elif kind != "none":
        weights |= {"w1": real(vocab, rank), "w2": real(draft_vocab, rank)}
    if kind == "gated":
        weights |= {"gate_weight": real(rank, size + rank), "gate_bias": real(rank)}
    if kind == "rnn":
        weights |= {"rnn_weight": real(3 * rank, 2 * rank + size)}
    if seed % 2:
        weights["confidence_bias"] = real(1)
    if draft_vocab != vocab:
        weights["d2t"] = rng.permutation(vocab)[:draft_vocab]
    return weights


HEADS = [
    ("none", "float32", 1500, 1500, 0), ("vanilla", "float32", 1500, 1500, 8), ("vanilla", "int8", 1500, 1500, 64),
    ("vanilla", "int8", 1500, 300, 19), ("gated", "float32", 400, 400, 17), ("gated", "int8", 400, 100, 16),
    ("rnn", "float32", 400, 100, 5), ("rnn", "int8", 400, 400, 33),
]  # fmt: skip


@pytest.mark.parametrize("candidates", [0, 13])
@pytest.mark.parametrize("mode", ["greedy", "rejection", "coupled"])
@pytest.mark.parametrize(("kind", "dtype", "vocab", "draft_vocab", "rank"), HEADS)
def test_round_is_equal(
    simd: str, kind: str, dtype: str, vocab: int, draft_vocab: int, rank: int, mode: Any, candidates: int
) -> None:
    """Draft, confidence, packing and acceptance of a ragged batch with mixed sampling parameters."""
    rng = np.random.default_rng(rank)
    num_requests, gamma, size = 5, 3, 21
    weights = random_heads(kind, dtype, vocab, draft_vocab, rank, size, seed=rank)
    core_heads = _core.DraftHeads(
        vocab_size=vocab, draft_vocab_size=draft_vocab, kind=kind, confidence_with_markov=kind != "none", **weights
    )
    twin_heads = heads.Heads(kind, **weights)
    temperature = np.array([0.0, 1.0, 0.6, 1.5, 1.0], np.float32)
    seeds = rng.integers(0, 2**63, num_requests, np.int64).astype(np.uint64)
    top_k, top_p = np.array([0, 0, 7, 0, 2]), np.array([1, 1, 0.9, 0.5, 1], np.float32)
    core_params = _core.Sampling(temperature, seeds, top_k, top_p)
    twin_params = chain.Sampling(temperature.tolist(), seeds.tolist(), top_k.tolist(), top_p.tolist())

    base = (rng.normal(size=(num_requests, gamma, draft_vocab)) * 2).astype(np.float32)
    base[::2] = np.round(base[::2], 1)  # ties among the candidates
    hidden = rng.normal(size=(num_requests, gamma, size)).astype(np.float32)
    anchors, positions = rng.integers(0, vocab, num_requests), rng.integers(0, 2**40, num_requests)
    core = _core.draft_chain(
        core_heads, base, anchors, positions, core_params, hidden=hidden, acceptance=mode, num_candidates=candidates
    )
    twin = chain.draft_chain(
        twin_heads, base, anchors, positions, twin_params, vocab,
        hidden=hidden, acceptance=mode, num_candidates=candidates,
    )  # fmt: skip
    assert same(core.tokens, twin.tokens)
    assert core.status.tolist() == twin.status.tolist() == [0] * num_requests
    for r, step in np.ndindex(num_requests, gamma):
        law = twin.masses[r][step]
        point = np.count_nonzero(law) == 1
        own = core.masses(r, step)
        assert np.array_equal(own > 0, law > 0) if point else same(own, law), f"request {r}, step {step}"

    scale, shift = np.array([1.0, 0.7, 2.0], np.float32), np.array([0.1, 0.0, -0.3], np.float32)
    assert same(
        _core.confidence(core_heads, hidden, anchors, core.tokens, temperature=scale, bias=shift),
        heads.confidence(twin_heads, hidden, anchors, twin.tokens, temperature=scale, bias=shift),
    )

    lengths = np.array([3, 3, 2, 3, 0])
    packed, own_packed = (
        pack(anchors, core.tokens, lengths, positions, pad_to=20) for pack in (_core.pack_tokens, packing.pack_tokens)
    )
    for name in own_packed._fields:
        assert same(getattr(packed, name), getattr(own_packed, name)), name
    # Target rows near the draft's, so that prefixes of every length get accepted.
    logits = rng.normal(size=(int((lengths + 1).sum()), vocab)).astype(np.float32)
    for r, step in ((0, 0), (1, 0), (1, 1), (3, 0), (2, 0)):
        logits[packed.cu_tokens[r] + step, core.tokens[r, step]] += 6
    result = _core.accept_ragged(logits, lengths, positions, core_params, draft=core, acceptance=mode)
    own_result = acceptance.accept_ragged(
        logits, lengths, positions, twin_params, twin.tokens, twin.masses, acceptance=mode
    )
    assert same(result.tokens, own_result.tokens)
    assert same(result.emitted_len, own_result.emitted_len)
    assert result.emitted_len.max() > 1
    point_result = _core.accept_ragged(
        logits, lengths, positions, core_params, draft_tokens=core.tokens, acceptance=mode
    )
    own_point = acceptance.accept_ragged(logits, lengths, positions, twin_params, twin.tokens, acceptance=mode)
    assert same(point_result.tokens, own_point.tokens)


def test_bad_rows_end_the_same_requests() -> None:
    logits = np.zeros((4, 50), np.float32)
    logits[0, 3], logits[1, 4], logits[2] = np.nan, np.inf, -np.inf
    params = np.ones(4, np.float32), np.arange(4, dtype=np.uint64)
    empty = np.zeros((4, 0), np.int64)
    core = _core.accept_ragged(logits, np.zeros(4, int), np.zeros(4, int), _core.Sampling(*params), draft_tokens=empty)
    own = acceptance.accept_ragged(
        logits, [0] * 4, [0] * 4, chain.Sampling([1] * 4, [0, 1, 2, 3], [0] * 4, [1] * 4), empty
    )
    assert core.status.tolist() == own.status.tolist() == [1, 1, 2, 0]
    assert same(core.tokens, own.tokens)


def test_bad_draft_rows_end_the_same_requests() -> None:
    base = np.zeros((4, 2, 50), np.float32)
    base[0, 1, 3], base[1, 0, 4], base[2, 1] = np.nan, np.inf, -np.inf
    params = np.ones(4, np.float32), np.arange(4, dtype=np.uint64)
    places = np.zeros(4, np.int64), np.zeros(4, np.int64)
    core = _core.draft_chain(
        _core.DraftHeads(vocab_size=50, draft_vocab_size=50, kind="none"), base, *places, _core.Sampling(*params)
    )
    twin_params = chain.Sampling([1] * 4, [0, 1, 2, 3], [0] * 4, [1] * 4)
    own = chain.draft_chain(heads.Heads(), base, *places, twin_params, 50)
    assert core.status.tolist() == own.status.tolist() == [1, 1, 2, 0]
    assert same(core.tokens, own.tokens)


def test_schedules_are_equal() -> None:
    for number, case in enumerate(random_cases(1500, seed=9)):
        grid = schedule.survival_grid(case.confidence, case.caps)
        costs = case.costs()
        limit = case.token_budget
        num_requests, gamma = case.confidence.shape
        theta = schedule.throughputs(
            grid, case.step_time_us, load_scale=case.load_scale, extra_tokens=case.extra_tokens,
            fixed_time_us=case.fixed_time_us,
        )  # fmt: skip
        caps = [gamma] * num_requests if case.caps is None else case.caps.tolist()
        expected = {
            "early_stop": schedule.early_stop(grid, theta, limit),
            "threshold": schedule.threshold(grid, 0.3, limit),
            "fixed": schedule.fixed(1, caps, limit),
            "stale_topk": schedule.stale_topk(grid, 4, limit),
        }
        options = {
            "early_stop": costs,
            "threshold": {"threshold": 0.3, "token_budget": limit},
            "fixed": {"draft_len": 1, "token_budget": limit},
            "stale_topk": {"budget": 4, "token_budget": limit},
        }
        for mode, lengths in expected.items():
            chosen = _core.schedule_prefixes(
                mode, num_requests=num_requests, max_draft_len=gamma, confidence=case.confidence, caps=case.caps,
                **options[mode],
            )  # fmt: skip
            assert chosen.verify_len.tolist() == lengths, f"{mode}, case {number}: {case}"
        budget, _ = _core.verify_budget(case.confidence, caps=case.caps, **costs)
        assert budget == schedule.verify_budget(theta, limit), f"case {number}: {case}"
