from __future__ import annotations

import math

import numpy as np
import pytest

from trtllm_dspark.reference.chain import draft_chain
from trtllm_dspark.reference.heads import Heads, confidence, first_state, markov_bias
from trtllm_dspark.reference.sampling import Law, token_law

V, R, D = 7, 3, 5


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.fixture
def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {
        "w1": (V, R), "w2": (V, R), "gate_weight": (R, D + R), "gate_bias": (R,),
        "rnn_weight": (3 * R, 2 * R + D), "rnn_bias": (3 * R,),
    }  # fmt: skip
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def argmax(law: Law, _: int) -> int:
    return int(np.argmax(law))


def test_vanilla_bias_is_the_product_of_both_factors(weights: dict[str, np.ndarray]) -> None:
    heads = Heads("vanilla", **weights)
    bias, _ = markov_bias(heads, first_state(heads), 4, None)
    assert np.allclose(bias, [sum(weights["w1"][4, i] * weights["w2"][v, i] for i in range(R)) for v in range(V)])


def test_gated_bias_by_scalar_loops(weights: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    heads, h, e = Heads("gated", **weights), rng.normal(size=D), weights["w1"][2]
    latent = []
    for i in range(R):
        row = weights["gate_weight"][i]
        z = sum(row[j] * h[j] for j in range(D)) + sum(row[D + j] * e[j] for j in range(R)) + weights["gate_bias"][i]
        latent.append(logistic(z) * e[i])
    assert np.allclose(markov_bias(heads, first_state(heads), 2, h)[0], weights["w2"] @ np.array(latent))


def test_rnn_bias_and_state_by_scalar_loops(weights: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    heads = Heads("rnn", **weights)
    state = first_state(heads)
    expected_state = [0.0] * R
    for token in (2, 6, 1):
        h, e = rng.normal(size=D), weights["w1"][token]
        z = [*expected_state, *e, *h]
        pre = [sum(w * x for w, x in zip(weights["rnn_weight"][i], z, strict=True)) for i in range(3 * R)]
        pre = [p + b for p, b in zip(pre, weights["rnn_bias"], strict=True)]
        gate = [logistic(p) for p in pre[:R]]
        expected_state = [
            g * s + (1 - g) * math.tanh(c) for g, s, c in zip(gate, expected_state, pre[R:], strict=False)
        ]
        output = [math.tanh(p) for p in pre[2 * R :]]
        bias, state = markov_bias(heads, state, token, h)
        assert np.allclose(state, expected_state)
        assert np.allclose(bias, weights["w2"] @ np.array(output))


def test_chain_slot_j_draws_token_j_from_the_token_before(weights: dict[str, np.ndarray]) -> None:
    # The head maps token t to t + 1; the base logits of slot j favour j * 0 (nothing), so the chain counts up.
    eye = np.eye(V)
    heads = Heads("vanilla", w1=eye, w2=10 * np.roll(eye, 1, axis=0))
    block = draft_chain(heads, np.zeros((3, V)), 2, argmax, V, temperature=0.0)
    assert block.tokens.tolist() == [3, 4, 5]
    rows = np.zeros((3, V))
    rows[np.arange(3), [6, 0, 1]] = 50.0  # base logits that name their own slot
    assert draft_chain(heads, rows, 2, argmax, V, temperature=0.0).tokens.tolist() == [6, 0, 1]


def test_chain_law_is_what_the_token_was_drawn_from(weights: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    heads, base = Heads("vanilla", **weights), rng.normal(size=(2, V))
    block = draft_chain(heads, base, 3, argmax, V, temperature=0.8, top_k=4)
    second = base[1] + weights["w2"] @ weights["w1"][block.tokens[0]]
    assert np.allclose(block.laws[1], token_law(second, 0.8, 4))


def test_chain_reduced_vocabulary_speaks_target_ids(weights: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    d2t = np.array([5, 0, 6])
    heads = Heads("vanilla", w1=weights["w1"], w2=weights["w2"][:3], d2t=d2t)
    base = rng.normal(size=(2, 3))
    block = draft_chain(heads, base, 1, argmax, V)
    assert set(block.tokens) <= {5, 0, 6}
    assert np.allclose(block.laws[0][d2t].sum(), 1)
    second = base[1] + weights["w2"][:3] @ weights["w1"][block.tokens[0]]
    assert np.allclose(block.laws[1][d2t], token_law(second, 1.0)), "w1 is not indexed by the target id"


def test_chain_candidates_come_from_base_logits_alone(weights: dict[str, np.ndarray]) -> None:
    base = np.array([[3.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    heads = Heads("vanilla", w1=np.ones((V, 1)), w2=np.array([[0, 0, 0, 0, 0, 0, 99.0]]).T)
    law = draft_chain(heads, base, 0, argmax, V, num_candidates=2).laws[0]
    assert np.flatnonzero(law).tolist() == [0, 1]  # the bias of 99 does not bring token 6 in; the tie goes to id 1
    assert np.allclose(law[:2], token_law(np.array([3.0, 2.0]), 1.0))


def test_confidence_reads_the_token_before_each_slot(rng: np.random.Generator) -> None:
    w1, hidden = rng.normal(size=(V, R)), rng.normal(size=(3, D))
    weight = rng.normal(size=D + R)
    heads = Heads("vanilla", w1=w1, w2=w1, confidence_weight=weight, confidence_bias=0.3)
    scale, shift = np.array([1.0, 2.0, 0.5]), np.array([0.0, 0.1, -0.2])
    chances = confidence(heads, hidden, 4, np.array([2, 6, 1]), temperature=scale, bias=shift)
    for k, before in enumerate((4, 2, 6)):
        z = hidden[k] @ weight[:D] + w1[before] @ weight[D:] + 0.3
        assert chances[k] == pytest.approx(logistic(z / scale[k] + shift[k]), rel=1e-12)
    other = confidence(heads, hidden, 4, np.array([2, 6, 5]), temperature=scale, bias=shift)
    assert np.array_equal(chances, other), "the last draft token must not matter"


def test_confidence_without_markov_half_ignores_tokens(rng: np.random.Generator) -> None:
    heads = Heads(confidence_weight=rng.normal(size=D))
    hidden = rng.normal(size=(3, D))
    assert np.array_equal(
        confidence(heads, hidden, 0, np.array([1, 2, 3])), confidence(heads, hidden, 6, np.array([3, 2, 1]))
    )
