from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.random_model import random_arrays

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.reference.acceptance import (
    accept_coupled,
    accept_greedy,
    accept_rejection,
    acceptance_probability,
    residual_law,
)
from trtllm_dspark.reference.decode import Drafter, Target, decode, speculative_decode
from trtllm_dspark.reference.models import drafter_block, drafter_context, target_forward
from trtllm_dspark.reference.packing import pack_tokens
from trtllm_dspark.reference.schedule import Number, threshold

P, Q = np.array([0.7, 0.3, 0.0]), np.array([0.5, 0.2, 0.3])


def test_acceptance_probability_is_the_capped_ratio() -> None:
    assert [acceptance_probability(P, Q, x) for x in range(3)] == [1.0, 1.0, 0.0]
    assert acceptance_probability(Q, P, 0) == pytest.approx(5 / 7)


def test_residual_law_is_the_normalised_positive_part() -> None:
    assert np.allclose(residual_law(P, Q), [2 / 3, 1 / 3, 0])
    assert np.array_equal(residual_law(P, P), P)


def test_accept_greedy_replaces_the_first_mismatch() -> None:
    assert accept_greedy([4, 5, 6], [4, 9]) == [4, 5]
    assert accept_greedy([4, 5, 6], [4, 5]) == [4, 5, 6]
    assert accept_greedy([4], []) == [4]


def test_accept_rejection_boundary_uniform_rejects() -> None:
    laws = [Q, P]
    assert accept_rejection(laws, [P], [0], [np.nextafter(5 / 7, 0)], 0.1) == [0, 0]
    assert accept_rejection(laws, [P], [0], [5 / 7], 0.1) == [2]  # the residual of Q over P is token 2 alone


def test_accept_coupled_emits_what_the_target_draws_without_a_draft(rng: np.random.Generator) -> None:
    laws = [P, Q, P]
    for _ in range(200):
        noise = list(rng.exponential(size=(3, 3)))
        plain = [accept_coupled([law], [], [e])[0] for law, e in zip(laws, noise, strict=True)]
        drafts = rng.integers(0, 3, 2).tolist()
        emitted = accept_coupled(laws, drafts, noise)
        assert emitted == plain[: len(emitted)]


def test_pack_tokens_ragged_rows_and_explicit_padding() -> None:
    packed = pack_tokens([7, 8, 9], [[1, 2], [3, 4], [5, 6]], [2, 0, 1], [10, 0, 30], pad_to=8)
    assert packed.cu_tokens.tolist() == [0, 3, 4, 6]
    assert packed.token_ids.tolist() == [7, 1, 2, 8, 9, 5, 0, 0]
    assert packed.token_request.tolist() == [0, 0, 0, 1, 2, 2, -1, -1]
    assert packed.token_position.tolist() == [10, 11, 12, 0, 30, 31, -1, -1]


@pytest.fixture
def pair(
    drafter: DrafterConfig, drafter_arrays: dict[str, np.ndarray], rng: np.random.Generator
) -> tuple[Target, Drafter]:
    target = replace(drafter.backbone, num_layers=3)
    arrays = drafter_arrays | {"confidence.weight": rng.normal(size=16).astype(np.float32)}
    return Target(target, random_arrays(target, rng)), Drafter(drafter, arrays)


def above(minimum: float) -> Callable[[list[Number]], int]:
    return lambda survival: threshold([survival], minimum)[0]


@pytest.mark.parametrize("choose", [len, above(0.3), lambda _: 0], ids=["fixed", "threshold", "none"])
def test_speculative_decode_greedy_equals_plain_decode(
    pair: tuple[Target, Drafter], choose: Callable[[list[Number]], int]
) -> None:
    prompt = [3, 1, 4, 1, 5]
    tokens, rounds = speculative_decode(*pair, prompt, 12, choose_length=choose, temperature=0.0, seed=0)
    assert tokens == decode(pair[0], prompt, 12, temperature=0.0, seed=0)
    for round_ in rounds:
        accepted = len(round_.emitted) - 1
        assert round_.emitted[:accepted] == round_.drafts[:accepted]
        assert accepted == round_.verify_len or round_.emitted[-1] != round_.drafts[accepted]


def test_speculative_decode_drafts_from_the_features_of_all_tokens_before_the_anchor(
    pair: tuple[Target, Drafter],
) -> None:
    target, drafter = pair
    prompt = [3, 1, 4, 1, 5]
    tokens, rounds = speculative_decode(target, drafter, prompt, 8, choose_length=len, temperature=0.0, seed=0)
    known = [*prompt, tokens[0]]
    for round_ in rounds:
        features = target_forward(*target, known[:-1], feature_layer_ids=drafter.config.target_layer_ids).features
        context = drafter_context(drafter.config, drafter.arrays, features)
        block = drafter_block(drafter.config, drafter.arrays, context, known[-1], target_arrays=target.arrays)
        factors = [drafter.arrays[f"markov.{name}.weight"].astype(np.float64) for name in ("w1", "w2")]
        before = known[-1]
        for step, token in enumerate(round_.drafts):
            before = int(np.argmax(block.base_logits[step] + factors[1] @ factors[0][before]))
            assert token == before
        known += round_.emitted
