"""The drafter in PyTorch over packed anchors: the context of a sequence is projected once for all its blocks.

Source: DSpark paper, sections 3.1 and 3.3. Shapes: S sequences of A blocks each, gamma slots a block, N context tokens
of all sequences together, C tokens of the longest context, n rows that carry a loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.train import autoregressive
from trtllm_dspark.train.layers import (
    Blocks,
    Frozen,
    Parameters,
    attention,
    finish_layer,
    key_value,
    linear,
    norm,
    product,
    queries_of,
)


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
    if config.autoregressive:
        hidden = autoregressive.unroll(parameters, frozen, config, blocks)[blocks.rows]
        return Predictions(hidden, product(hidden, frozen.head), None)
    hidden = backbone(parameters, frozen, config, blocks)
    # Once for both heads: its gradient is collected row by row.
    embedded = None
    if config.markov_head != "none":
        embedded = markov_rows(parameters, blocks.previous_ids.reshape(-1)[blocks.rows])
    state = None if embedded is None else _head_state(parameters, config, hidden, embedded)
    logits = product(hidden, frozen.head)
    if state is not None:
        w2 = parameters["markov.w2.weight"]
        logits = logits.addmm_(state.to(w2.dtype), w2.t())
    confidence = None
    if config.confidence:
        inputs = hidden
        if config.confidence_with_markov:
            assert embedded is not None
            inputs = torch.cat([hidden, embedded], -1)
        confidence = inputs @ parameters["confidence.weight"] + parameters["confidence.bias"]
    return Predictions(hidden, logits, confidence)


def backbone(parameters: Parameters, frozen: Frozen, config: DrafterConfig, blocks: Blocks) -> Tensor:
    """Return the hidden rows [n, d] of the wanted slots, after the final norm."""
    model = config.backbone
    eps = model.rms_norm_eps
    context = product(blocks.features, parameters["fc.weight"])
    context = norm(context, parameters["hidden_norm.weight"], eps).to(context.dtype)
    num_sequences, num_blocks, gamma = blocks.input_ids.shape
    positions = (blocks.anchors[..., None] + torch.arange(gamma)).reshape(-1)
    hidden_keys = torch.arange(blocks.context_index.shape[1]) >= blocks.context_lens[..., None]
    x = frozen.embedding[blocks.input_ids.reshape(-1)]
    for layer in range(model.num_layers):
        name = f"layers.{layer}"
        # Cast once for its three products.
        normed = norm(x, parameters[f"{name}.attn_norm.weight"], eps).to(context.dtype)
        keys, values = key_value(parameters, frozen, model, layer, context, blocks.context_positions)
        own_keys, own_values = key_value(parameters, frozen, model, layer, normed, positions)
        queries = queries_of(parameters, frozen, model, layer, normed, positions)
        attended = attention(
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
        x = finish_layer(parameters, model, layer, x, attended)
    return norm(x, parameters["norm.weight"], eps)


def head_step(
    parameters: Parameters, config: DrafterConfig, hidden: Tensor, rows: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run the sequential head on rows of one slot.

    Args:
        parameters: canonical name -> tensor.
        config: of the drafter; it has a sequential head.
        hidden: [n, d] hidden rows of the slot.
        rows: [n, r] `markov_rows` of the token before.
        state: [n, r] of an rnn head, None for its zeros and for other heads.

    Returns:
        What W2 multiplies, [n, r], and the next state.
    """
    if config.markov_head == "vanilla":
        return rows, None
    if config.markov_head == "gated":
        return torch.sigmoid(linear(parameters, "markov.gate", torch.cat([hidden, rows], -1))) * rows, None
    state = torch.zeros_like(rows) if state is None else state
    joint = linear(parameters, "markov.rnn", torch.cat([state, rows, hidden], -1))
    gate, candidate, output = joint.chunk(3, -1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


def markov_rows(parameters: Parameters, previous: Tensor) -> Tensor:
    """Return W1's rows [n, r] of target ids; their gradient is sparse, as W1 has a row for every token there is."""
    return F.embedding(previous, parameters["markov.w1.weight"], sparse=True)


def _head_state(parameters: Parameters, config: DrafterConfig, hidden: Tensor, rows: Tensor) -> Tensor:
    """Return what W2 multiplies for all rows, [n, r]; the drafter has a sequential head."""
    if config.markov_head != "rnn":
        return head_step(parameters, config, hidden, rows, None)[0]
    # The recurrence needs every slot, so all rows are wanted here.
    slots, tokens = (one.view(-1, config.block_size, one.shape[-1]) for one in (hidden, rows))
    state: Tensor | None = None
    outputs = []
    for slot in range(config.block_size):
        output, state = head_step(parameters, config, slots[:, slot], tokens[:, slot], state)
        outputs.append(output)
    return torch.stack(outputs, 1).reshape(-1, config.markov_rank)
