"""The bit-level twins against exact arithmetic and against the float64 reference."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from trtllm_dspark.reference import chain, heads, sampling, schedule
from trtllm_dspark.reference.bits import chain as bit_chain
from trtllm_dspark.reference.bits import heads as bit_heads
from trtllm_dspark.reference.bits import schedule as bit_schedule
from trtllm_dspark.reference.bits.acceptance import accept_ragged
from trtllm_dspark.reference.bits.float32 import dot16, dot_in_order, exp2, exponential, fma32, sigmoid, tanh
from trtllm_dspark.reference.bits.philox import philox, philox_raw, unit53
from trtllm_dspark.reference.bits.rows import (
    accept_test,
    coupled_pick,
    pick,
    residual_masses,
    row_masses,
    row_status,
    total,
)


def nearest_float32(value: Fraction) -> np.float32:
    """Round a rational to binary32, to nearest even, by comparing neighbours exactly."""
    guess = np.float32(float(value))
    near = [np.nextafter(guess, np.float32(side)) for side in (-np.inf, np.inf)] + [guess]
    return min(near, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view(np.uint32)) & 1))


def test_fma32_rounds_once(rng: np.random.Generator) -> None:
    a, b = (rng.normal(size=3000).astype(np.float32) for _ in range(2))
    c = (-a.astype(np.float64) * b * (1 + rng.choice([0, 1e-7, 1e-3, 1], 3000))).astype(np.float32)  # cancellation
    c[::3] *= np.float32(2.0**-30)
    c[1::3] *= np.float32(2.0**25)
    expected = [
        nearest_float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert np.array_equal(fma32(a, b, c), np.array(expected, np.float32))


def test_fma32_double_rounding_case_differs_from_two_roundings() -> None:
    # a * b is half an ulp above 1 in binary32; c tips it over, but only below binary64's precision.
    a, b, c = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2.0**-60)
    assert float(fma32(a, b, c)) == 1 + 2**-11 + 2**-23
    assert float(np.float32(float(a) * float(b) + float(c))) == 1 + 2**-11


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert philox_raw(counter, key) == words


def test_philox_words_depend_on_seed_position_stream_and_block() -> None:
    base = (7, 2**40 + 3, 1, 2)
    seen = {philox(*base)}
    for field, values in enumerate([(8, 7 + 2**32), (2**40 + 4, 3), (0, 5), (0, 3)]):
        seen |= {philox(*base[:field], value, *base[field + 1 :]) for value in values}
    assert len(seen) == 9


def test_exp2_and_exponential_are_accurate(rng: np.random.Generator) -> None:
    x = rng.uniform(-64, 10, 20000).astype(np.float32)
    ulp = np.spacing(np.exp2(x.astype(np.float64)).astype(np.float32))
    assert (np.abs(exp2(x) - np.exp2(x.astype(np.float64))) / ulp).max() <= 1.0
    words = np.concatenate([rng.integers(0, 2**32, 20000), [0, 1, 2**31 - 1, 2**31, 2**32 - 1], 2 ** np.arange(32)])
    truth = -np.log1p(-(words.astype(np.float64) + 0.5) / 2**32) / math.log(2)
    assert (np.abs(exponential(words) - truth) / truth).max() < 4e-7


def test_sigmoid_and_tanh_are_accurate_and_bounded(rng: np.random.Generator) -> None:
    z = np.concatenate([rng.normal(size=5000) * 5, [0, 200, -200, np.inf, -np.inf]]).astype(np.float32)
    with np.errstate(over="ignore"):
        assert np.abs(sigmoid(z) - 1 / (1 + np.exp(-z.astype(np.float64)))).max() < 2e-7
    assert np.abs(tanh(z) - np.tanh(z.astype(np.float64))).max() < 5e-7
    assert np.isnan(sigmoid(np.float32(np.nan)))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 77])
def test_dots_of_small_integers_are_exact(size: int, rng: np.random.Generator) -> None:
    a, b = (rng.integers(-50, 50, (4, size)).astype(np.float32) for _ in range(2))
    assert np.array_equal(dot16(a, b[0]), a @ b[0])
    assert np.array_equal(dot_in_order(b[0], a), a @ b[0])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.6), (9, 0.8)])
def test_row_masses_are_the_law(top_k: int, top_p: float, rng: np.random.Generator) -> None:
    logits = np.round(rng.normal(size=40) * 2, 1).astype(np.float32)  # rounded: ties occur
    masses = row_masses(logits, 0.7, top_k, top_p)
    law = sampling.token_law(logits, 0.7, top_k, float(np.float32(top_p)))
    assert np.abs(masses / total(masses) - law).max() < 1e-6
    assert np.array_equal(masses > 0, law > 0)


def test_row_status_names_the_trouble() -> None:
    row = np.array([0, -np.inf, 1], np.float32)
    assert row_status(row) == 0
    assert row_status(np.array([0, np.nan], np.float32)) == 1
    assert row_status(np.array([0, np.inf], np.float32)) == 1
    assert row_status(np.full(3, -np.inf, np.float32)) == 2


def test_pick_covers_each_id_by_its_mass() -> None:
    masses = np.array([0, 3, 0, 5, 0], np.uint64)
    edge = -(-3 * 2**64 // 8)  # first bits whose target reaches 3
    assert [pick(masses, bits) for bits in (0, edge - 1, edge, 2**64 - 1)] == [1, 1, 3, 3]
    assert pick(np.zeros(3, np.uint64), 5) == -1


def test_accept_test_threshold_is_p_over_q() -> None:
    bits = int(0.25 * 2**53) << 11  # p / q = (1/8) / (1/2)
    assert not accept_test(bits, 1, 8, 1, 2)
    assert accept_test(bits - 1, 1, 8, 1, 2)
    assert not accept_test(0, 0, 8, 1, 2), "a filtered token is never accepted"
    assert unit53(2**64 - 1) < 1


def test_residual_masses_are_the_positive_part(rng: np.random.Generator) -> None:
    target, draft = (rng.integers(0, 2**40, 30).astype(np.uint64) for _ in range(2))
    p, q = target / total(target), draft / total(draft)
    residual = residual_masses(target, draft)
    assert np.abs(residual / 2**51 - np.maximum(p - q, 0)).max() < 2**-50
    assert not residual_masses(target, target).any()


def test_coupled_pick_equal_laws_agree_and_law_is_followed() -> None:
    masses = np.zeros(2500, np.uint64)
    masses[[3, 1030, 1031, 2400]] = [10, 20, 30, 40]  # three tiles
    picks = [coupled_pick(masses, seed, 17) for seed in range(2000)]
    counts = np.array([picks.count(token) for token in (3, 1030, 1031, 2400)])
    assert counts.sum() == 2000
    assert np.abs(counts / 2000 - [0.1, 0.2, 0.3, 0.4]).max() < 5 * 0.5 / math.sqrt(2000)
    assert picks == [coupled_pick(masses * 7, seed, 17) for seed in range(2000)]


def example_heads(kind: heads.HeadKind, rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"w1": (40, 6), "w2": (40, 6), "confidence_weight": (11,)}
    if kind == "gated":
        shapes |= {"gate_weight": (6, 11), "gate_bias": (6,)}
    if kind == "rnn":
        shapes |= {"rnn_weight": (18, 17), "rnn_bias": (18,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
def test_chain_twin_follows_the_float64_chain(kind: heads.HeadKind, rng: np.random.Generator) -> None:
    weights = example_heads(kind, rng)
    base, hidden = (rng.normal(size=(1, 4, n)).astype(np.float32) for n in (40, 5))
    params = bit_chain.Sampling([0.9], [123], [0], [1.0])
    anchors, positions = np.array([7]), np.array([50])
    draft = bit_chain.draft_chain(bit_heads.Heads(kind, **weights), base, anchors, positions, params, 40, hidden=hidden)

    wide = heads.Heads(kind, **{name: value.astype(np.float64) for name, value in weights.items()})
    block = chain.draft_chain(
        wide, base[0], 7, lambda _, step: int(draft.tokens[0, step]), 40, hidden=hidden[0], temperature=0.9
    )  # fmt: skip
    for step in range(4):
        masses = draft.masses[0][step]
        assert np.abs(masses / total(masses) - block.laws[step]).max() < 2e-6
    chances = bit_heads.confidence(bit_heads.Heads(kind, **weights), hidden, anchors, draft.tokens)
    assert np.abs(chances[0] - heads.confidence(wide, hidden[0], 7, block.tokens)).max() < 1e-6


def test_chain_twin_int8_factors_equal_their_float_values(rng: np.random.Generator) -> None:
    factors = [rng.integers(-127, 128, (30, 8)).astype(np.int8) for _ in range(2)]
    scales = [rng.uniform(0.01, 0.02, 30).astype(np.float32) for _ in range(2)]
    small = bit_heads.Heads("vanilla", *factors, *scales)
    values = [f.astype(np.float32) * s[:, None] for f, s in zip(factors, scales, strict=True)]
    logits = rng.normal(size=30).astype(np.float32)
    state = np.zeros(8, np.float32)
    exact, _ = bit_heads.corrected_logits(small, logits, state, 11, None)
    wide, _ = bit_heads.corrected_logits(bit_heads.Heads("vanilla", *values), logits, state, 11, None)
    assert np.abs(exact - wide).max() < 1e-5


def test_chain_twin_bad_row_ends_that_request_only(rng: np.random.Generator) -> None:
    base = rng.normal(size=(2, 3, 10)).astype(np.float32)
    base[0, 1, 4] = np.nan
    params = bit_chain.Sampling([1.0, 1.0], [1, 2], [0, 0], [1.0, 1.0])
    draft = bit_chain.draft_chain(bit_heads.Heads(), base, np.zeros(2, int), np.zeros(2, int), params, 10)
    assert draft.status.tolist() == [1, 0]
    assert draft.tokens[0].tolist() == [-1, -1, -1]
    assert (draft.tokens[1] >= 0).all()


def test_schedule_twin_equals_algorithm_1_without_rounding(rng: np.random.Generator) -> None:
    for _ in range(300):
        num_requests, gamma = int(rng.integers(0, 6)), int(rng.integers(1, 6))
        chances = rng.choice([0, 0.25, 0.5, 0.9, 1, rng.random()], (num_requests, gamma)).astype(np.float32)
        times = np.cumsum(rng.choice([0, 0, 0.5, 3], num_requests * (gamma + 1) + 1)).astype(np.float32) + np.float32(5)
        grid = bit_schedule.survival_grid(chances)
        theta = bit_schedule.throughputs(grid, times)
        exact = [[Fraction(a, 2**31) for a in row] for row in grid]

        def speed(tokens: int, times: np.ndarray = times) -> Fraction:
            return 1 / Fraction(float(times[tokens]))

        assert bit_schedule.early_stop(grid, theta) == schedule.early_stop(exact, speed)
        assert bit_schedule.verify_budget(theta) == schedule.verify_budget(exact, speed)
        for budget in (0, 1, 3, 100):
            assert bit_schedule.stale_topk(grid, budget) == schedule.stale_topk(exact, budget)
        assert bit_schedule.threshold(grid, 0.5) == schedule.threshold(exact, Fraction(1, 2))


def test_schedule_twin_equal_throughput_is_no_gain() -> None:
    grid = bit_schedule.survival_grid(np.ones((1, 3), np.float32))
    theta = bit_schedule.throughputs(grid, np.arange(5, dtype=np.float32))
    assert len(set(theta)) == 1
    assert bit_schedule.early_stop(grid, theta) == [0]
    assert bit_schedule.verify_budget(theta) == 0


def test_schedule_twin_token_budget_cuts_step_by_step() -> None:
    assert bit_schedule.fixed(3, [3, 1, 3], token_budget=5) == [2, 1, 2]
    assert bit_schedule.fixed(3, [3, 1, 3], token_budget=4) == [2, 1, 1]


@pytest.mark.parametrize("acceptance", ["greedy", "coupled"])
def test_accept_twin_output_does_not_depend_on_the_draft(
    acceptance: bit_chain.AcceptanceMode, rng: np.random.Generator
) -> None:
    logits = rng.normal(size=(3, 20)).astype(np.float32)
    params = bit_chain.Sampling([1.0], [99], [0], [1.0])
    plain = [
        int(accept_ragged(row[None], [0], [10 + k], params, np.zeros((1, 0), int), acceptance=acceptance).tokens[0, 0])
        for k, row in enumerate(logits)
    ]
    for drafts in ([0, 0], [plain[0], 0], plain[:2]):
        result = accept_ragged(logits, [2], [10], params, np.array([drafts]), acceptance=acceptance)
        length = int(result.emitted_len[0])
        assert result.tokens[0, :length].tolist() == plain[:length]
    assert length == 3


def test_accept_twin_reads_no_row_behind_a_rejection(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(3, 20)).astype(np.float32)
    logits[2] = np.nan
    best = logits.argmax(1)
    params = bit_chain.Sampling([0.0], [1], [0], [1.0])
    rejected = accept_ragged(logits, [2], [0], params, np.array([[best[0], (best[1] + 1) % 20]]))
    assert rejected.tokens[0].tolist() == [best[0], best[1], -1]
    reached = accept_ragged(logits, [2], [0], params, np.array([[best[0], best[1]]]))
    assert reached.status.tolist() == [1]
    assert reached.emitted_len.tolist() == [0]
