"""Draft chain, confidence and acceptance against the NumPy twins, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.core_cases import HeadCase, available_levels, head_case, logit_rows, normal, sampling, simd

from trtllm_dspark import _core
from trtllm_dspark.reference.bits import acceptance, chain, heads

R, GAMMA = 5, 4
KINDS = ["none", "vanilla", "gated", "rnn"]
MODES = ["greedy", "rejection", "coupled"]


def block(rng: np.random.Generator, case: HeadCase) -> dict[str, np.ndarray]:
    return {
        "base_logits": logit_rows(rng, (R, GAMMA, case.draft_vocab)),
        "hidden": normal(rng, (R, GAMMA, case.hidden)),
        "anchors": rng.integers(0, case.vocab, R),
        "positions": rng.integers(0, 2**40, R),
    }


def assert_same_draft(got: _core.Draft, expected: chain.Draft, what: str) -> None:
    np.testing.assert_array_equal(got.status, expected.status, what)
    np.testing.assert_array_equal(got.tokens, expected.tokens, what)
    for request in range(got.num_requests):
        if got.status[request]:
            continue
        for step in range(got.num_steps):
            q, p = got.masses(request, step), expected.masses[request][step]
            scale = 2**40 if p.sum() == 1 else 1  # the twin writes a point mass as 1
            np.testing.assert_array_equal(q, p * np.uint64(scale), f"{what} {request=} {step=}")


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_draft_chain_equals_twin(level: str, kind: str, int8: bool) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for draft_vocab in (None, 77):
        case = head_case(rng, kind, int8=int8, draft_vocab=draft_vocab, with_bias=draft_vocab is None)
        native, twin, data = case.native(), case.twin(), block(rng, case)
        for mode in MODES:
            for num_candidates in (0, 13):
                params, twin_params = sampling(rng, R)
                arguments = {**data, "acceptance": mode, "num_candidates": num_candidates}
                with simd(level):
                    got = _core.draft_chain(native, sampling=params, **arguments)
                expected = chain.draft_chain(twin, sampling=twin_params, vocab_size=case.vocab, **arguments)
                assert_same_draft(got, expected, f"{draft_vocab=} {mode=} {num_candidates=}")


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 16, 33])
@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_draft_chain_of_several_tiles_equals_twin(level: str, int8: bool, rank: int) -> None:
    rng = np.random.default_rng(rank)
    case = head_case(rng, "vanilla", int8=int8, vocab=2100, rank=rank)
    params, twin_params = sampling(rng, R)
    data = block(rng, case)
    with simd(level):
        got = _core.draft_chain(case.native(), sampling=params, num_steps=2, **data)
    expected = chain.draft_chain(case.twin(), sampling=twin_params, vocab_size=2100, num_steps=2, **data)
    assert_same_draft(got, expected, f"{rank=}")


def test_draft_chain_bad_rows_end_their_request_alone() -> None:
    rng = np.random.default_rng(3)
    case = head_case(rng, "vanilla")
    data = block(rng, case)
    data["base_logits"][1, 2, 50] = np.nan
    data["base_logits"][2, 0] = -np.inf
    data["base_logits"][3, 3, 7] = np.inf
    params, twin_params = sampling(rng, R)
    got = _core.draft_chain(case.native(), sampling=params, **data)
    expected = chain.draft_chain(case.twin(), sampling=twin_params, vocab_size=case.vocab, **data)
    assert_same_draft(got, expected, "bad rows")
    assert got.status.tolist() == [0, 1, 2, 1, 0]


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_markov", [False, True])
def test_confidence_equals_twin(level: str, kind: str, with_markov: bool) -> None:
    rng = np.random.default_rng(4)
    for int8 in (False, True):
        case = head_case(rng, kind, int8=int8, with_markov=with_markov, with_bias=int8)
        hidden, anchors = normal(rng, (R, GAMMA, case.hidden)), rng.integers(0, case.vocab, R)
        tokens = rng.integers(0, case.vocab, (R, 3))
        tokens[2] = -1
        for calibration in ({}, {"temperature": normal(rng, (3,)) ** 2 + np.float32(0.1), "bias": normal(rng, (3,))}):
            with simd(level):
                got = _core.confidence(case.native(), hidden, anchors, tokens, **calibration)
            expected = heads.confidence(case.twin(), hidden, anchors, tokens, **calibration)
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("mode", MODES)
def test_accept_ragged_equals_twin(level: str, mode: str) -> None:
    rng = np.random.default_rng(MODES.index(mode) + 10)
    for draft_vocab, num_candidates in [(None, 0), (60, 0), (None, 9), (60, 9)]:
        for _ in range(6):
            case = head_case(rng, "vanilla", vocab=90, draft_vocab=draft_vocab, rank=4)
            params, twin_params = sampling(rng, R)
            data = {**block(rng, case), "acceptance": mode, "num_candidates": num_candidates}
            draft = _core.draft_chain(case.native(), sampling=params, **data)
            twin = chain.draft_chain(case.twin(), sampling=twin_params, vocab_size=90, **data)
            verify_len = rng.integers(0, GAMMA + 1, R)
            logits = near(rng, data["base_logits"], case, verify_len)
            with simd(level):
                got = _core.accept_ragged(logits, verify_len, data["positions"], params, draft=draft, acceptance=mode)
            expected = acceptance.accept_ragged(
                logits, verify_len.tolist(), data["positions"], twin_params, twin.tokens, twin.masses, mode
            )
            np.testing.assert_array_equal(got.tokens, expected.tokens)
            np.testing.assert_array_equal(got.emitted_len, expected.emitted_len)
            np.testing.assert_array_equal(got.status, expected.status)
            np.testing.assert_array_equal(got.accepted_len, np.maximum(expected.emitted_len - 1, 0))


def near(rng: np.random.Generator, base: np.ndarray, case: HeadCase, verify_len: np.ndarray) -> np.ndarray:
    """Return target rows that resemble the draft's, so that all outcomes occur; one row is bad now and then."""
    rows = []
    for request, length in enumerate(verify_len):
        for step in range(length + 1):
            row = normal(rng, (case.vocab,), 2.0)
            ids = case.arguments.get("d2t", np.arange(case.vocab))
            row[ids] += base[request, min(step, GAMMA - 1)]
            rows.append(row)
    logits = np.array(rows, np.float32)
    if rng.random() < 0.3:
        logits[rng.integers(len(logits)), rng.integers(case.vocab)] = rng.choice([np.nan, np.inf])
    return logits


@pytest.mark.parametrize("mode", MODES)
def test_accept_ragged_of_given_tokens_equals_twin(mode: str) -> None:
    rng = np.random.default_rng(31)
    for _ in range(20):
        params, twin_params = sampling(rng, R)
        tokens, verify_len = rng.integers(0, 6, (R, GAMMA)), rng.integers(0, GAMMA + 1, R)
        logits = logit_rows(rng, (int(np.sum(1 + verify_len)), 6))
        positions = rng.integers(0, 1000, R)
        got = _core.accept_ragged(logits, verify_len, positions, params, draft_tokens=tokens, acceptance=mode)
        expected = acceptance.accept_ragged(
            logits, verify_len.tolist(), positions, twin_params, tokens, acceptance=mode
        )
        np.testing.assert_array_equal(got.tokens, expected.tokens)


def test_accept_ragged_draft_rows_choose_rows_of_the_draft() -> None:
    rng = np.random.default_rng(17)
    case = head_case(rng, "vanilla", vocab=30)
    params, _ = sampling(rng, R)
    data = block(rng, case)
    draft = _core.draft_chain(case.native(), sampling=params, **data)
    verify_len = np.full(R, GAMMA)
    logits = near(rng, data["base_logits"], case, verify_len)[:, : case.vocab]
    logits = np.nan_to_num(logits, nan=0.0, posinf=0.0, neginf=-50.0)
    whole = _core.accept_ragged(logits, verify_len, data["positions"], params, draft=draft)
    rows = np.array([-1, 2, 3, -1, 4])
    lens = np.where(rows < 0, 0, GAMMA)
    assert whole.tokens.shape == (R, GAMMA + 1)
    with pytest.raises(Exception, match="no row in draft"):
        _core.accept_ragged(logits, verify_len, data["positions"], params, draft=draft, draft_rows=rows)
    starts = np.concatenate([[0], np.cumsum(1 + lens)])
    part = np.zeros((int(starts[-1]), case.vocab), np.float32)
    part[starts[4] : starts[5]] = logits[4 * (GAMMA + 1) : 5 * (GAMMA + 1)]
    some = _core.accept_ragged(part, lens, data["positions"], params, draft=draft, draft_rows=rows)
    np.testing.assert_array_equal(some.tokens[4], whole.tokens[4])
    assert some.emitted_len[0] == 1
    assert some.emitted_len[3] == 1


def test_logprobs_are_the_target_softmax_at_temperature_one() -> None:
    rng = np.random.default_rng(21)
    logits = normal(rng, (6, 3000), 3.0)
    params, _ = sampling(rng, 6)
    got = _core.accept_ragged(logits, np.zeros(6, np.int64), np.arange(6), params, logprobs=True)
    wide = logits.astype(np.float64)
    exact = wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)
    assert got.logprobs is not None
    assert got.logprobs.shape == (6, 1)
    for row in range(6):
        assert abs(got.logprobs[row, 0] - exact[row, got.tokens[row, 0]]) < 1e-5
