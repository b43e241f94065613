"""The float32 engine against the reference forward pass, over the variants a checkpoint may have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.random_model import TINY
from helpers.tiny_engine import SMALL, make_engine, small_drafter

from trtllm_dspark.checkpoint.config import ModelConfig, RopeScaling
from trtllm_dspark.engine.base import TokenBatch
from trtllm_dspark.graph import WeightDtype
from trtllm_dspark.reference.models import target_forward

VARIANTS = {
    "llama": SMALL,
    "tied": replace(SMALL, tie_word_embeddings=True),
    "qwen3": replace(SMALL, architecture="qwen3", qk_norm=True),
    "bias": replace(SMALL, attention_bias=True),
    "multi_head": replace(SMALL, num_kv_heads=4),
    "one_kv_head": replace(SMALL, num_kv_heads=1),
    "llama3_rope": replace(
        SMALL, rope_scaling=RopeScaling(8.0, 1.0, 4.0, original_max_position_embeddings=64), rope_theta=5e5
    ),
    "odd_sizes": replace(TINY, max_position_embeddings=1024),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_target_float32_equals_reference(config: ModelConfig, tmp_path: Path) -> None:
    tiny = make_engine(tmp_path, config, small_drafter(config))
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 150)
    logits, features = tiny.target(tokens)
    expected = target_forward(config, tiny.arrays, tokens, feature_layer_ids=(0, 2))
    assert np.abs(logits - expected.logits).max() < 1e-4 * np.abs(expected.logits).max()
    assert np.abs(features - expected.features).max() < 1e-4 * np.abs(expected.features).max()


@pytest.mark.parametrize("weight_dtype", ["int8", "w8a8"])
def test_target_8bit_stays_near_reference(weight_dtype: WeightDtype, tmp_path: Path) -> None:
    """Random networks amplify rounding: 0.13 here, where wrong wiring gives more than 1."""
    tiny = make_engine(tmp_path, weight_dtype=weight_dtype)
    tokens = np.random.default_rng(1).integers(0, SMALL.vocab_size, 100)
    expected = target_forward(SMALL, tiny.arrays, tokens).logits
    error = np.sqrt(np.mean((tiny.target(tokens)[0] - expected) ** 2) / np.mean(expected**2))
    assert 0 < error < 0.3


def test_logit_rows_select_and_order_rows(tmp_path: Path) -> None:
    tiny = make_engine(tmp_path)
    tokens = np.arange(7) + 3
    everything = tiny.target(tokens)[0]
    rows = np.array([6, 0, 3, 3])
    out = tiny.engine.verify(TokenBatch(tokens, np.array([7]), np.array([0]), rows))
    assert np.array_equal(out.logits, everything[rows])
    assert out.features.shape == (7, 0)


def test_rotary_table_reaches_the_last_position(tmp_path: Path) -> None:
    tiny = make_engine(tmp_path, max_seq_len=130, max_num_tokens=130)
    tokens = np.random.default_rng(1).integers(0, SMALL.vocab_size, 130)
    expected = target_forward(SMALL, tiny.arrays, tokens).logits
    got = tiny.chunks(tokens, [100, 29, 1])
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
