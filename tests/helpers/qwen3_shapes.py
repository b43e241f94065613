"""A target and drafter with Qwen3-8B's layer shapes, two layers each and a small vocabulary, without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig

TARGET = ModelConfig(
    architecture="qwen3",
    vocab_size=8192,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    qk_norm=True,
)
DRAFTER = DrafterConfig(
    backbone=replace(TARGET, num_layers=2),
    block_size=7,
    target_layer_ids=(0, 1),
    num_target_layers=2,
    target_hidden_size=4096,
    mask_token_id=3,
    markov_head="vanilla",
    markov_rank=256,
    confidence=True,
    confidence_with_markov=True,
    draft_vocab_size=8192,
)


class RandomArrays(Mapping[str, np.ndarray]):
    """Arrays made when they are read; large ones repeat a random piece, since only shapes matter to a compiler."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._piece = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._shapes:
            raise KeyError(name)
        # An own offset a name: equal tensors could be merged by a compiler.
        start = sorted(self._shapes).index(name)
        return np.resize(self._piece[start:], self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * width, config.num_kv_heads * width
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (d,)}
    for layer in range(config.num_layers):
        for name, shape in (
            ("attn_norm", (d,)),
            ("mlp_norm", (d,)),
            ("q", (query, d)),
            ("k", (kv, d)),
            ("v", (kv, d)),
            ("o", (d, query)),
            ("q_norm", (width,)),
            ("k_norm", (width,)),
            ("gate", (inner, d)),
            ("up", (inner, d)),
            ("down", (d, inner)),
        ):
            shapes[f"layers.{layer}.{name}.weight"] = shape
    return shapes


def target_arrays() -> RandomArrays:
    table = (TARGET.vocab_size, TARGET.hidden_size)
    return RandomArrays(layer_shapes(TARGET) | {"embed.weight": table, "lm_head.weight": table})


def drafter_arrays() -> RandomArrays:
    """Return a drafter that shares the target's embedding and head."""
    size = DRAFTER.backbone.hidden_size
    own: dict[str, tuple[int, ...]] = {"fc.weight": (size, DRAFTER.feature_size), "hidden_norm.weight": (size,)}
    factor = (TARGET.vocab_size, DRAFTER.markov_rank)
    own |= {"markov.w1.weight": factor, "markov.w2.weight": factor}
    own |= {"confidence.weight": (size + DRAFTER.markov_rank,), "confidence.bias": (1,)}
    return RandomArrays(layer_shapes(DRAFTER.backbone) | own)
