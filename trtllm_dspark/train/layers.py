"""What drafters of every kind are made of in PyTorch: blocks over packed contexts, and the parts of a layer.

Shapes: S sequences of A blocks each, gamma slots a block, N context tokens of all sequences together, C tokens of the
longest context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.graph._rope import rope_tables
from trtllm_dspark.train.operations import attend, rms_norm, rotate_halves

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Frozen:
    """What the drafter takes from its target and never changes.

    Attributes:
        embedding: [V, d].
        head: [Vd, d] rows of the output head that the drafter proposes from.
        cos: [positions, D / 2]; rotary tables.
        sin: the same.
    """

    embedding: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(embedding: Tensor, head: Tensor, config: ModelConfig, num_positions: int) -> Frozen:
        """Add the rotary tables of `num_positions` positions."""
        cos, sin = rope_tables(config, num_positions)
        return Frozen(embedding, head, torch.from_numpy(cos), torch.from_numpy(sin))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one pass.

    Attributes:
        features: [N, m d] target features of the sequences' contexts, packed.
        context_positions: [N] int64.
        context_index: [S, C] int64, packed row of each padded context token; any row behind a context's end.
        anchors: [S, A] int64, the anchors' positions.
        context_lens: [S, A] int64, context tokens a block sees: those below its anchor.
        following_ids: [N] int64, the token behind each context token.
        input_ids: [S, A, gamma] int64: anchor, masks.
        previous_ids: [S, A, gamma] int64, token before each predicted one: anchor, then the sequence itself.
        rows: [n] int64, slots (of the flattened S A gamma) whose predictions are wanted, ascending.
    """

    features: Tensor
    context_positions: Tensor
    context_index: Tensor
    anchors: Tensor
    context_lens: Tensor
    following_ids: Tensor
    input_ids: Tensor
    previous_ids: Tensor
    rows: Tensor


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T (+ bias) in the weight's precision."""
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


def linear(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    """Return x W^T (+ bias) of `name`."""
    return product(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x over its last axis."""
    # Products in bfloat16 are normed in the weight's own precision.
    return rms_norm(x, weight, eps)


def key_value(
    parameters: Parameters, frozen: Frozen, model: ModelConfig, layer: int, x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return K (normed, rotated) and V [rows, Hkv, D] of rows x at their positions."""
    name, shape = f"layers.{layer}", (-1, model.num_kv_heads, model.head_dim)
    keys = norm(linear(parameters, f"{name}.k", x).view(shape), parameters[f"{name}.k_norm.weight"], model.rms_norm_eps)
    values = linear(parameters, f"{name}.v", x).view(shape)
    return rotate(keys, frozen, positions).to(values.dtype), values


def rotate(x: Tensor, frozen: Frozen, positions: Tensor) -> Tensor:
    """Rotate halves of [rows, heads, D] by their position."""
    cos, sin = frozen.cos[positions][:, None], frozen.sin[positions][:, None]
    return rotate_halves(x, cos, sin)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, hidden_keys: Tensor
) -> Tensor:
    """Let every slot see its sequence's context below the anchor and its whole block.

    Args:
        queries: [S, A, gamma, H, D].
        keys: [S, C, Hkv, D] of the padded contexts; `values` alike.
        values: see keys.
        own_keys: [S, A, any, Hkv, D] of the slots that all slots see; `own_values` alike.
        own_values: see own_keys.
        hidden_keys: [S, A, C], true where the block must not look.

    Returns:
        [S A gamma, H D].
    """
    sequences, blocks, gamma, heads, size = queries.shape
    kv_heads = keys.shape[2]
    groups = heads // kv_heads
    # [S, Hkv, A, gamma, G, D]: one product a sequence and KV head over all its blocks.
    q = (queries * (1 / math.sqrt(size))).to(values.dtype).view(sequences, blocks, gamma, kv_heads, groups, size)
    q = q.permute(0, 3, 1, 2, 4, 5).reshape(sequences, kv_heads, blocks, gamma * groups, size)
    k, v = (given.permute(0, 2, 1, 3) for given in (keys, values))
    own_k, own_v = (own.permute(0, 3, 1, 2, 4) for own in (own_keys, own_values))
    out = attend(q, k, v, own_k, own_v, hidden_keys[:, None, :, None])
    out = out.view(sequences, kv_heads, blocks, gamma, groups, size).permute(0, 2, 3, 1, 4, 5)
    return out.reshape(sequences * blocks * gamma, heads * size)


def queries_of(
    parameters: Parameters, frozen: Frozen, model: ModelConfig, layer: int, x: Tensor, positions: Tensor
) -> Tensor:
    """Return the queries [rows, H, D] (normed, rotated) of rows x at their positions."""
    rows = linear(parameters, f"layers.{layer}.q", x).view(-1, model.num_heads, model.head_dim)
    return rotate(norm(rows, parameters[f"layers.{layer}.q_norm.weight"], model.rms_norm_eps), frozen, positions)


def finish_layer(parameters: Parameters, model: ModelConfig, layer: int, x: Tensor, attended: Tensor) -> Tensor:
    """Return the layer's output [rows, d] from its residual stream and what its attention gave."""
    name = f"layers.{layer}"
    x = x + linear(parameters, f"{name}.o", attended)
    normed = norm(x, parameters[f"{name}.mlp_norm.weight"], model.rms_norm_eps)
    normed = normed.to(parameters[f"{name}.gate.weight"].dtype)
    gate = F.silu(product(normed, parameters[f"{name}.gate.weight"]))
    return x + product(gate * product(normed, parameters[f"{name}.up.weight"]), parameters[f"{name}.down.weight"])
