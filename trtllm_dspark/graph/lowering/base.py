"""What a lowering provides: the three uses of attention in a target and its drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph.matrices import WeightDtype
from trtllm_dspark.graph.network import Network
from trtllm_dspark.graph.weights import Weights


class SelfAttention(Protocol):
    """Attention of one network; called once a layer."""

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> str:
        """Append projections, rotary embedding, cache update and attention of `layer`.

        Args:
            net: the graph.
            weights: where the projections come from.
            layer: index of the decoder layer.
            x: [T, d] normed rows.

        Returns:
            [T, H * D] value, the input of the output projection.
        """
        ...


class ContextCache(Protocol):
    """Writes K and V of context rows into the drafter's cache; called once a layer."""

    def __call__(self, net: Network, weights: Weights, layer: int, x: str) -> None:
        """Append K and V projections of x [T, d], rotary embedding and the cache update of `layer`."""
        ...


class Lowering(Protocol):
    """One target's spelling of attention; each method declares the graph inputs it needs."""

    @property
    def name(self) -> str:
        """Name used in manifests and messages."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of activations and caches."""
        ...

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Integer type of token ids and row indices among the graph inputs."""
        ...

    @property
    def native_heads(self) -> bool:
        """Whether the block graph holds the drafter's heads too, as standard operators."""
        ...

    @property
    def weight_dtypes(self) -> tuple[WeightDtype, ...]:
        """Formats of linear layers it can be combined with."""
        ...

    def add_norm(self, net: Network, x: str, change: str, scale: str, epsilon: float) -> tuple[str, str]:
        """Append x + change [T, d] and its RMSNorm with weight `scale` [d]; returns both."""
        ...

    def causal(self, net: Network, config: ModelConfig, num_positions: int) -> SelfAttention:
        """Ragged causal attention over packed rows: the target."""
        ...

    def block(self, net: Network, config: ModelConfig, num_positions: int, block_size: int) -> SelfAttention:
        """Attention of the drafter's block: rows [R * gamma] see the context and, in both directions, their block."""
        ...

    def context(self, net: Network, config: ModelConfig, num_positions: int) -> ContextCache:
        """Cache update of the drafter's context over packed rows."""
        ...

    def check(self, model: onnx.ModelProto, directory: Path) -> None:
        """Refuse a finished graph, its data files in `directory`, that the target would misread.

        Raises:
            EngineError: it would.
        """
        ...


def check_weight_dtype(lowering: Lowering, weight_dtype: WeightDtype) -> None:
    """Refuse a weight format that the lowering cannot multiply.

    Raises:
        ConfigError: it cannot.
    """
    if weight_dtype not in lowering.weight_dtypes:
        raise ConfigError(
            f"weights stored as {weight_dtype} cannot be used by the {lowering.name} lowering; "
            f"use {' or '.join(lowering.weight_dtypes)}"
        )
