from __future__ import annotations

import numpy as np

from trtllm_dspark.reference.sampling import invert, race, token_law


def test_token_law_temperature_is_softmax_of_scaled_logits() -> None:
    law = token_law(np.log([1.0, 2.0, 5.0]) * 0.5, 0.5)
    assert np.allclose(law, [0.125, 0.25, 0.625], rtol=1e-14)


def test_token_law_zero_temperature_is_lowest_id_of_the_largest() -> None:
    assert token_law(np.array([1.0, 3.0, 3.0]), 0.0).tolist() == [0, 1, 0]


def test_token_law_top_k_keeps_ties_of_the_kth() -> None:
    law = token_law(np.log([4.0, 2.0, 2.0, 1.0]), 1.0, top_k=2)
    assert np.allclose(law, [0.5, 0.25, 0.25, 0.0], rtol=1e-14)


def test_token_law_top_p_keeps_the_smallest_covering_set_and_its_ties() -> None:
    logits = np.log([0.5, 0.2, 0.2, 0.1])
    assert np.allclose(token_law(logits, 1.0, top_p=0.5), [1, 0, 0, 0])
    assert np.allclose(token_law(logits, 1.0, top_p=0.51), np.array([5, 2, 2, 0]) / 9)
    assert np.allclose(token_law(logits, 1.0, top_p=0.95), [0.5, 0.2, 0.2, 0.1])


def test_token_law_top_p_applies_to_what_top_k_kept() -> None:
    logits = np.log([0.5, 0.3, 0.2])
    assert np.allclose(token_law(logits, 1.0, top_k=2, top_p=0.6), [1, 0, 0])  # 0.5 / 0.8 covers 0.6


def test_invert_boundaries_select_next_token_and_skip_impossible_ones() -> None:
    law = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [invert(law, u) for u in (0.0, 0.2499, 0.25, 0.999999, np.nextafter(1, 0))] == [1, 1, 3, 3, 3]


def test_race_wins_follow_the_law(rng: np.random.Generator) -> None:
    law = np.array([0.1, 0.0, 0.6, 0.3])
    wins = np.bincount([race(law, e) for e in rng.exponential(size=(40000, 4))], minlength=4)
    assert wins[1] == 0
    assert np.abs(wins / 40000 - law).max() < 5 * 0.5 / 200  # five standard deviations
