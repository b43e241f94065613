"""A target and drafter with Qwen3-8B's layer shapes, two layers each and a small vocabulary, without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from helpers.tiny_engine import small_drafter
from trtllm_dspark.checkpoint._drafter import drafter_shapes
from trtllm_dspark.checkpoint._mapping import layer_shapes
from trtllm_dspark.checkpoint.config import ModelConfig

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
DRAFTER = small_drafter(TARGET, block_size=7, target_layer_ids=(0, 1), markov_rank=256)


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


def target_arrays() -> RandomArrays:
    table = (TARGET.vocab_size, TARGET.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": table,
        "lm_head.weight": table,
        "norm.weight": (TARGET.hidden_size,),
    }
    for layer in range(TARGET.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(TARGET).items()}
    return RandomArrays(shapes)


def drafter_arrays() -> RandomArrays:
    """Return a drafter that shares the target's embedding and head."""
    return RandomArrays(drafter_shapes(DRAFTER, TARGET))
