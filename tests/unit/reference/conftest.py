"""Tiny random models for the tests of the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.random_model import TINY, random_arrays
from helpers.tiny_engine import small_drafter

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


@pytest.fixture
def qwen3() -> ModelConfig:
    return replace(TINY, architecture="qwen3", qk_norm=True, rope_theta=1e6, rms_norm_eps=1e-6)


@pytest.fixture
def llama() -> ModelConfig:
    return replace(TINY, attention_bias=True, tie_word_embeddings=True)


@pytest.fixture
def drafter(qwen3: ModelConfig) -> DrafterConfig:
    return small_drafter(qwen3, block_size=4, target_layer_ids=(0, 1), mask_token_id=5, markov_rank=4)


@pytest.fixture
def drafter_arrays(drafter: DrafterConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = random_arrays(drafter.backbone, rng)
    del arrays["lm_head.weight"], arrays["embed.weight"]
    d, rank, vocab = drafter.backbone.hidden_size, drafter.markov_rank, drafter.backbone.vocab_size
    arrays["fc.weight"] = rng.normal(size=(d, drafter.feature_size)).astype(np.float32)
    arrays["hidden_norm.weight"] = rng.uniform(0.5, 1.5, d).astype(np.float32)
    for name in ("markov.w1", "markov.w2"):
        arrays[f"{name}.weight"] = rng.normal(size=(vocab, rank)).astype(np.float32)
    return arrays
