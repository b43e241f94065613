"""Tables of rotary position embeddings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """Return the [D / 2] rotation speeds in radians a position, Llama-3 scaling applied.

    float32 throughout: the models were trained with tables computed that way.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    speeds = (np.float32(1) / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    return speeds if config.rope_scaling is None else _llama3(speeds, config.rope_scaling)


def _llama3(speeds: NDArray[np.float32], scaling: RopeScaling) -> NDArray[np.float32]:
    """Slow long waves down by `factor`, keep short ones, blend in between."""
    wavelength = 2 * np.pi / speeds.astype(np.float64)
    context = scaling.original_max_position_embeddings
    blend = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * speeds / scaling.factor + blend * speeds).astype(np.float32)


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosine and sine tables, both [num_positions, D / 2] float32."""
    angles = np.outer(np.arange(num_positions, dtype=np.float32), inverse_frequencies(config)).astype(np.float32)
    return np.cos(angles), np.sin(angles)
