"""The stack of decoder layers every network is made of, on packed rows [T, d]; attention comes from a lowering."""

from __future__ import annotations

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.graph.lowering.base import Lowering, SelfAttention
from trtllm_dspark.graph.network import Network
from trtllm_dspark.graph.weights import Weights


def decoder_layers(
    net: Network, weights: Weights, config: ModelConfig, x: str, lowering: Lowering, attention: SelfAttention
) -> list[str]:
    """Append every decoder layer and return the output [T, d] of each.

    Layer: y = x + Attention(Norm(x)); output = y + W_down(SiLU(W_gate Norm(y)) * W_up Norm(y)).
    """
    outputs: list[str] = []
    change: str | None = None
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        x, normed = _residual_norm(net, weights, config, lowering, x, change, f"{prefix}.attn_norm")
        if change is not None:
            outputs.append(x)
        mixed = attention(net, weights, layer, normed)
        x, change = finish_layer(net, weights, config, lowering, layer, x, mixed)
    return [*outputs, x if change is None else net.node("Add", x, change)]


def finish_layer(
    net: Network, weights: Weights, config: ModelConfig, lowering: Lowering, layer: int, x: str, mixed: str
) -> tuple[str, str]:
    """Append what follows the attention of a layer.

    Args:
        net: the graph.
        weights: of the layer.
        config: shapes of the layer.
        lowering: how sums and norms are spelled.
        layer: index.
        x: [T, d] residual stream.
        mixed: [T, H D] output of the attention.

    Returns:
        The residual stream with the attention's share, and what the MLP adds to it.
    """
    prefix, size, inner = f"layers.{layer}", config.hidden_size, config.intermediate_size
    projected = weights.linear(net, mixed, [f"{prefix}.o"], [size], config.num_heads * config.head_dim)
    x, normed = _residual_norm(net, weights, config, lowering, x, projected, f"{prefix}.mlp_norm")
    both = weights.linear(net, normed, [f"{prefix}.gate", f"{prefix}.up"], [inner, inner], size)
    gate, up = net.split("Split", [both, net.ints(inner, inner)], 2, axis=-1)
    active = net.node("Mul", net.node("Mul", gate, net.node("Sigmoid", gate)), up)
    return x, weights.linear(net, active, [f"{prefix}.down"], [size], inner)


def _residual_norm(
    net: Network, weights: Weights, config: ModelConfig, lowering: Lowering, x: str, change: str | None, norm: str
) -> tuple[str, str]:
    """Add a layer's change to the residual stream and norm the sum; returns both."""
    if change is None:
        return x, weights.norm(net, x, norm, config.hidden_size, config.rms_norm_eps)
    scale = weights.norm_weight(net, norm, config.hidden_size)
    return lowering.add_norm(net, x, change, scale, config.rms_norm_eps)
