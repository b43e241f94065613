"""The drafter in PyTorch over packed anchors: the context of a sequence is projected once for all its blocks.

Source: DSpark paper, sections 3.1 and 3.3. Shapes: S sequences of A blocks each, gamma slots a block, N context tokens
of all sequences together, C tokens of the longest context, n rows that carry a loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.graph._rope import rope_tables

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
        input_ids: [S, A, gamma] int64: anchor, masks.
        previous_ids: [S, A, gamma] int64, token before each predicted one: anchor, then the sequence itself.
        rows: [n] int64, slots (of the flattened S A gamma) whose predictions are wanted, ascending.
    """

    features: Tensor
    context_positions: Tensor
    context_index: Tensor
    anchors: Tensor
    context_lens: Tensor
    input_ids: Tensor
    previous_ids: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Predictions:
    """Result for the wanted rows.

    Attributes:
        hidden: [n, d] after the final norm.
        logits: [n, Vd] with the sequential head's bias.
        confidence: [n] logits of the confidence head, or None without one.
    """

    hidden: Tensor
    logits: Tensor
    confidence: Tensor | None


def predict(parameters: Parameters, frozen: Frozen, config: DrafterConfig, blocks: Blocks) -> Predictions:
    """Run the drafter teacher-forced over all blocks."""
    hidden = backbone(parameters, frozen, config, blocks)
    previous = blocks.previous_ids.reshape(-1)[blocks.rows]
    state = _head_state(parameters, config, blocks, hidden, previous)
    logits = F.linear(hidden, frozen.head)
    if state is not None:
        logits = torch.addmm(logits, state, parameters["markov.w2.weight"].t())
    confidence = None
    if config.confidence:
        inputs = hidden
        if config.confidence_with_markov:
            inputs = torch.cat([hidden, F.embedding(previous, parameters["markov.w1.weight"])], -1)
        confidence = inputs @ parameters["confidence.weight"] + parameters["confidence.bias"]
    return Predictions(hidden, logits, confidence)


def backbone(parameters: Parameters, frozen: Frozen, config: DrafterConfig, blocks: Blocks) -> Tensor:
    """Return the hidden rows [n, d] of the wanted slots, after the final norm."""
    model = config.backbone
    eps = model.rms_norm_eps
    context = F.linear(blocks.features, parameters["fc.weight"])
    context = _norm(context, parameters["hidden_norm.weight"], eps)
    num_sequences, num_blocks, gamma = blocks.input_ids.shape
    positions = (blocks.anchors[..., None] + torch.arange(gamma)).reshape(-1)
    hidden_keys = torch.arange(blocks.context_index.shape[1]) >= blocks.context_lens[..., None]
    x = frozen.embedding[blocks.input_ids.reshape(-1)]
    for layer in range(model.num_layers):
        name = f"layers.{layer}"
        normed = _norm(x, parameters[f"{name}.attn_norm.weight"], eps)
        keys, values = _key_value(parameters, frozen, model, layer, context, blocks.context_positions)
        own_keys, own_values = _key_value(parameters, frozen, model, layer, normed, positions)
        queries = _linear(parameters, f"{name}.q", normed).view(-1, model.num_heads, model.head_dim)
        queries = _rotate(_norm(queries, parameters[f"{name}.q_norm.weight"], eps), frozen, positions)
        attended = _attention(
            queries.view(num_sequences, num_blocks, gamma, model.num_heads, model.head_dim),
            keys[blocks.context_index],
            values[blocks.context_index],
            own_keys.view(num_sequences, num_blocks, gamma, model.num_kv_heads, model.head_dim),
            own_values.view(num_sequences, num_blocks, gamma, model.num_kv_heads, model.head_dim),
            hidden_keys,
        )
        if layer == model.num_layers - 1 and blocks.rows.numel() < x.shape[0]:
            # Nothing reads the other slots of the last layer any more.
            attended, x = attended[blocks.rows], x[blocks.rows]
        x = x + _linear(parameters, f"{name}.o", attended)
        normed = _norm(x, parameters[f"{name}.mlp_norm.weight"], eps)
        gate = F.silu(F.linear(normed, parameters[f"{name}.gate.weight"]))
        x = x + F.linear(gate * F.linear(normed, parameters[f"{name}.up.weight"]), parameters[f"{name}.down.weight"])
    return _norm(x, parameters["norm.weight"], eps)


def _linear(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Products in bfloat16 are normed in the weight's own precision.
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps)


def _key_value(
    parameters: Parameters, frozen: Frozen, model: ModelConfig, layer: int, x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    name, shape = f"layers.{layer}", (-1, model.num_kv_heads, model.head_dim)
    keys = _norm(
        _linear(parameters, f"{name}.k", x).view(shape), parameters[f"{name}.k_norm.weight"], model.rms_norm_eps
    )
    return _rotate(keys, frozen, positions), _linear(parameters, f"{name}.v", x).view(shape)


def _rotate(x: Tensor, frozen: Frozen, positions: Tensor) -> Tensor:
    """Rotate halves of [rows, heads, D] by their position."""
    cos, sin = frozen.cos[positions][:, None], frozen.sin[positions][:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, hidden_keys: Tensor
) -> Tensor:
    """Let every slot see its sequence's context below the anchor and its whole block.

    Args:
        queries: [S, A, gamma, H, D].
        keys: [S, C, Hkv, D] of the padded contexts; `values` alike.
        values: see keys.
        own_keys: [S, A, gamma, Hkv, D] of the blocks; `own_values` alike.
        own_values: see own_keys.
        hidden_keys: [S, A, C], true where the block must not look.

    Returns:
        [S A gamma, H D].
    """
    sequences, blocks, gamma, heads, size = queries.shape
    kv_heads, length = keys.shape[2], keys.shape[1]
    groups = heads // kv_heads
    # [S, Hkv, A, gamma, G, D]: one product a sequence and KV head over all its blocks.
    q = (queries * (1 / math.sqrt(size))).view(sequences, blocks, gamma, kv_heads, groups, size)
    q = q.permute(0, 3, 1, 2, 4, 5).contiguous()
    rows = gamma * groups
    scores = q.view(sequences, kv_heads, blocks * rows, size) @ keys.permute(0, 2, 3, 1)
    scores = scores.view(sequences, kv_heads, blocks, rows, length)
    scores = scores.masked_fill(hidden_keys[:, None, :, None], float("-inf"))
    k, v = (own.permute(0, 3, 1, 2, 4) for own in (own_keys, own_values))
    own_scores = q.view(sequences, kv_heads, blocks, rows, size) @ k.transpose(-1, -2)
    weights = torch.softmax(torch.cat([scores, own_scores], -1), -1)
    seen, own = weights[..., :length], weights[..., length:]
    out = seen.reshape(sequences, kv_heads, blocks * rows, length) @ values.permute(0, 2, 1, 3)
    out = out.view(sequences, kv_heads, blocks, rows, size) + own @ v
    out = out.view(sequences, kv_heads, blocks, gamma, groups, size).permute(0, 2, 3, 1, 4, 5)
    flat: Tensor = out.reshape(sequences * blocks * gamma, heads * size)
    return flat


def head_step(
    parameters: Parameters, config: DrafterConfig, hidden: Tensor, previous: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run the sequential head on rows of one slot.

    Args:
        parameters: canonical name -> tensor.
        config: of the drafter; it has a sequential head.
        hidden: [n, d] hidden rows of the slot.
        previous: [n] target ids of the token before.
        state: [n, r] of an rnn head, None for its zeros and for other heads.

    Returns:
        What W2 multiplies, [n, r], and the next state.
    """
    rows = F.embedding(previous, parameters["markov.w1.weight"])
    if config.markov_head == "vanilla":
        return rows, None
    if config.markov_head == "gated":
        return torch.sigmoid(_linear(parameters, "markov.gate", torch.cat([hidden, rows], -1))) * rows, None
    state = torch.zeros_like(rows) if state is None else state
    joint = _linear(parameters, "markov.rnn", torch.cat([state, rows, hidden], -1))
    gate, candidate, output = joint.chunk(3, -1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


def _head_state(
    parameters: Parameters, config: DrafterConfig, blocks: Blocks, hidden: Tensor, previous: Tensor
) -> Tensor | None:
    """Return what W2 multiplies for all rows, [n, r], or None without a sequential head."""
    if config.markov_head == "none":
        return None
    if config.markov_head != "rnn":
        return head_step(parameters, config, hidden, previous, None)[0]
    # The recurrence needs every slot, so all rows are wanted here.
    slots, tokens = hidden.view(-1, config.block_size, hidden.shape[-1]), previous.view(-1, config.block_size)
    state: Tensor | None = None
    outputs = []
    for slot in range(config.block_size):
        output, state = head_step(parameters, config, slots[:, slot], tokens[:, slot], state)
        outputs.append(output)
    return torch.stack(outputs, 1).reshape(-1, config.markov_rank)
