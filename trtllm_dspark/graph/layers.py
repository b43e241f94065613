"""The decoder layer every network is made of, on packed rows [T, d]; attention comes from a lowering."""

from __future__ import annotations

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.graph.lowering.base import SelfAttention
from trtllm_dspark.graph.network import Network
from trtllm_dspark.graph.weights import Weights


def decoder_layer(
    net: Network, weights: Weights, config: ModelConfig, layer: int, x: str, attention: SelfAttention
) -> str:
    """Append decoder layer `layer` and return its output [T, d].

    x + Attention(Norm(x)), then y + W_down(SiLU(W_gate Norm(y)) * W_up Norm(y)).
    """
    prefix = f"layers.{layer}"
    size, inner = config.hidden_size, config.intermediate_size
    normed = weights.norm(net, x, f"{prefix}.attn_norm", size, config.rms_norm_eps)
    mixed = attention(net, weights, layer, normed)
    projected = weights.linear(net, mixed, [f"{prefix}.o"], [size], config.num_heads * config.head_dim)
    x = net.node("Add", x, projected)

    normed = weights.norm(net, x, f"{prefix}.mlp_norm", size, config.rms_norm_eps)
    both = weights.linear(net, normed, [f"{prefix}.gate", f"{prefix}.up"], [inner, inner], size)
    gate, up = net.split("Split", [both, net.ints(inner, inner)], 2, axis=-1)
    active = net.node("Mul", net.node("Mul", gate, net.node("Sigmoid", gate)), up)
    return net.node("Add", x, weights.linear(net, active, [f"{prefix}.down"], [size], inner))
