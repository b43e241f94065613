"""Tiny models with random weights, as canonical arrays."""

from __future__ import annotations

import numpy as np

from trtllm_dspark.checkpoint.config import ModelConfig

TINY = ModelConfig(
    architecture="llama",
    vocab_size=23,
    hidden_size=12,
    intermediate_size=20,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def random_arrays(config: ModelConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    d, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    rows = {"q": config.num_heads * width, "k": config.num_kv_heads * width, "v": config.num_kv_heads * width}
    arrays = {"embed.weight": rng.normal(size=(config.vocab_size, d)), "norm.weight": rng.uniform(0.5, 1.5, d)}
    if not config.tie_word_embeddings:
        arrays["lm_head.weight"] = rng.normal(size=(config.vocab_size, d))
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        for name in ("attn_norm", "mlp_norm"):
            arrays[f"{prefix}.{name}.weight"] = rng.uniform(0.5, 1.5, d)
        for name, size in rows.items():
            arrays[f"{prefix}.{name}.weight"] = rng.normal(size=(size, d)) * 0.3
            if config.attention_bias:
                arrays[f"{prefix}.{name}.bias"] = rng.normal(size=size)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                arrays[f"{prefix}.{name}.weight"] = rng.uniform(0.5, 1.5, width)
        arrays[f"{prefix}.o.weight"] = rng.normal(size=(d, rows["q"])) * 0.3
        arrays[f"{prefix}.gate.weight"] = rng.normal(size=(inner, d)) * 0.3
        arrays[f"{prefix}.up.weight"] = rng.normal(size=(inner, d)) * 0.3
        arrays[f"{prefix}.down.weight"] = rng.normal(size=(d, inner)) * 0.3
    return {name: value.astype(np.float32) for name, value in arrays.items()}
