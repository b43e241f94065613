"""The reference's whole round, networks included, follows the target's law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from helpers.chi_square import chi_square_p
from helpers.random_model import TINY, random_arrays

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.reference.decode import Drafter, Target, speculative_decode
from trtllm_dspark.reference.models import target_forward
from trtllm_dspark.reference.sampling import token_law
from trtllm_dspark.reference.schedule import threshold

SAMPLES, TEMPERATURE, PROMPT = 1500, 0.8, [2, 0, 1]


def test_speculative_decode_sampled_follows_the_target_law() -> None:
    rng = np.random.default_rng(77)
    config = replace(
        TINY, vocab_size=4, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2
    )
    target = Target(config, random_arrays(config, rng))
    arrays = random_arrays(config, rng) | {
        "fc.weight": rng.normal(size=(4, 4)),
        "hidden_norm.weight": np.ones(4),
        "markov.w1.weight": rng.normal(size=(4, 2)),
        "markov.w2.weight": rng.normal(size=(4, 2)),
        "confidence.weight": rng.normal(size=6),
    }
    drafter = Drafter(
        DrafterConfig(
            backbone=config, block_size=2, target_layer_ids=(0,), num_target_layers=1, target_hidden_size=4,
            mask_token_id=3, markov_head="vanilla", markov_rank=2, confidence=True, confidence_with_markov=True,
            draft_vocab_size=4,
        ),
        arrays,
    )  # fmt: skip

    def law_after(tokens: list[int]) -> np.ndarray:
        return token_law(target_forward(config, target.arrays, tokens).logits[-1], TEMPERATURE)

    law = np.zeros((4, 4, 4))
    for a, b in np.ndindex(4, 4):
        law[a, b] = law_after(PROMPT)[a] * law_after([*PROMPT, a])[b] * law_after([*PROMPT, a, b])
    counts, lengths = np.zeros((4, 4, 4)), set()
    for seed in range(SAMPLES):
        tokens, rounds = speculative_decode(
            target, drafter, PROMPT, 3, choose_length=lambda a: threshold([a], 0.1)[0], temperature=TEMPERATURE,
            seed=seed,
        )  # fmt: skip
        counts[tuple(tokens)] += 1
        lengths |= {round_.verify_len for round_ in rounds}
    assert lengths == {0, 1, 2}, "the schedule decides nothing"
    assert chi_square_p(counts, law) > 1e-6
    assert chi_square_p(counts, np.full((4, 4, 4), 1 / 64)) < 1e-6
