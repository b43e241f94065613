"""The drafter's weights before the first step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_dspark.checkpoint import Checkpoint, autoregressive_shapes
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.errors import ConfigError

Arrays = Mapping[str, NDArray[Any]]

_LAYER_PARTS = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")


def from_target(config: DrafterConfig, target: ModelConfig, arrays: Arrays, seed: int) -> dict[str, Tensor]:
    """Initialise from the target: its last layers, its final norm, and its latest feature as the context.

    The drafter then starts as a short-sighted copy of the target's end instead of noise. Weights without a counterpart
    are drawn with a standard deviation of 0.02.
    """
    if config.autoregressive:
        return _autoregressive_from_target(config, target, arrays, seed)
    model, rng = config.backbone, np.random.default_rng([seed, 7])
    size, rank, vocab = model.hidden_size, config.markov_rank, model.vocab_size
    values: dict[str, NDArray[np.float32]] = {}
    for layer in range(model.num_layers):
        values |= _layer(config, arrays, target.num_layers - model.num_layers + layer, layer)
    values["norm.weight"] = np.asarray(arrays["norm.weight"], np.float32)
    values["hidden_norm.weight"] = np.ones(size, np.float32)
    fc = _draw(rng, size, config.feature_size, scale=0.002)
    fc[:, -size:] += 0.5 * np.eye(size, dtype=np.float32)
    values["fc.weight"] = fc
    if config.markov_head != "none":
        values["markov.w1.weight"] = _draw(rng, vocab, rank, scale=0.1)
        values["markov.w2.weight"] = np.zeros((config.draft_vocab_size, rank), np.float32)
    if config.markov_head == "gated":
        values["markov.gate.weight"] = _draw(rng, rank, size + rank)
        values["markov.gate.bias"] = np.ones(rank, np.float32)
    if config.markov_head == "rnn":
        values["markov.rnn.weight"] = _draw(rng, 3 * rank, 2 * rank + size)
        values["markov.rnn.bias"] = np.zeros(3 * rank, np.float32)
    if config.confidence:
        values["confidence.weight"] = np.zeros(size + (rank if config.confidence_with_markov else 0), np.float32)
        values["confidence.bias"] = np.zeros(1, np.float32)
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}


def _layer(config: DrafterConfig, arrays: Arrays, source: int, layer: int) -> dict[str, NDArray[np.float32]]:
    """Return layer `source` of the target as layer `layer` of the drafter."""
    values: dict[str, NDArray[np.float32]] = {}
    for part in _LAYER_PARTS:
        for kind in ("weight", "bias"):
            name = f"layers.{source}.{part}.{kind}"
            if name in arrays:
                values[f"layers.{layer}.{part}.{kind}"] = np.asarray(arrays[name], np.float32)
    for part in ("q_norm", "k_norm"):
        name = f"layers.{source}.{part}.weight"
        values[f"layers.{layer}.{part}.weight"] = (
            np.asarray(arrays[name], np.float32) if name in arrays else np.ones(config.backbone.head_dim, np.float32)
        )
    return values


def _autoregressive_from_target(
    config: DrafterConfig, target: ModelConfig, arrays: Arrays, seed: int
) -> dict[str, Tensor]:
    """Initialise a one-layer head with the target's last layer; what joins token and feature is new."""
    rng, size = np.random.default_rng([seed, 7]), config.backbone.hidden_size
    values = _layer(config, arrays, target.num_layers - 1, 0)
    for name in ("embed_norm.weight", "hidden_norm.weight"):
        values[name] = np.ones(size, np.float32)
    values["norm.weight"] = np.asarray(arrays["norm.weight"], np.float32)
    if config.kind == "eagle3":
        # The feature's half of a pair is what the target's layer would have normed.
        values["hidden_norm.weight"] = values.pop("layers.0.attn_norm.weight")
        for part in "qkv":
            weight = values[f"layers.0.{part}.weight"]
            values[f"layers.0.{part}.weight"] = np.concatenate([_draw(rng, *weight.shape, scale=0.002), weight], 1)
        values["fc.weight"] = _draw(rng, size, config.feature_size, scale=0.002)
        values["fc.weight"][:, -size:] += np.eye(size, dtype=np.float32)
    else:
        # Passing the feature through would begin with the target's certainty about the token before.
        values["eh_proj.weight"] = _draw(rng, size, 2 * size)
    assert {name: value.shape for name, value in values.items()} == autoregressive_shapes(config)
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}


def from_arrays(config: DrafterConfig, arrays: Arrays, draft_token_ids: NDArray[np.int64] | None) -> dict[str, Tensor]:
    """Take over a drafter's weights; of W2 only the rows of `draft_token_ids` are trained, all where it is None."""
    values = {}
    for name in arrays:
        if name in ("embed.weight", "lm_head.weight", "d2t"):
            continue
        value = np.array(arrays[name], np.float32, order="C")
        if name == "markov.w2.weight" and draft_token_ids is not None:
            value = np.ascontiguousarray(value[draft_token_ids])
        values[name] = torch.from_numpy(value)
    if config.confidence:
        # A file may leave it out; a step has one to train.
        values.setdefault("confidence.bias", torch.zeros(1))
    return values


def drafter_config(
    target: ModelConfig,
    *,
    num_layers: int,
    block_size: int,
    target_layer_ids: tuple[int, ...],
    mask_token_id: int,
    markov_head: Any,
    markov_rank: int,
    draft_vocab_size: int,
) -> DrafterConfig:
    """Return the configuration of a new drafter with the target's own layer shapes."""
    backbone = replace(target, architecture="qwen3", num_layers=num_layers, qk_norm=True, tie_word_embeddings=False)
    rank = 0 if markov_head == "none" else markov_rank
    return DrafterConfig(
        backbone=backbone,
        block_size=block_size,
        target_layer_ids=target_layer_ids,
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        mask_token_id=mask_token_id,
        markov_head=markov_head,
        markov_rank=rank,
        confidence=True,
        confidence_with_markov=rank > 0,
        draft_vocab_size=draft_vocab_size,
    )


def unused_token(target: Checkpoint) -> int:
    """Return a special token that neither the chat template nor the end of a text uses: what masks a block.

    Raises:
        ConfigError: the tokenizer has none.
    """
    if target.tokenizer is not None:
        config, template = target.config, target.tokenizer.chat_template or ""
        used = {config.bos_token_id, config.pad_token_id, *config.eos_token_ids}
        added = json.loads(target.tokenizer.tokenizer_json).get("added_tokens", [])
        free = [
            int(token["id"])
            for token in added
            if token.get("special") and token["id"] not in used and token["content"] not in template
        ]
        if free:
            return max(free)
    raise ConfigError("the tokenizer has no special token that is free for masks; give --mask_token_id")


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return five layers spread from the second to the last but one, as DeepSpec does."""
    first, last = min(1, num_layers - 2), num_layers - 2
    return tuple(sorted({round(first + (last - first) * i / 4) for i in range(5)}))


def eagle3_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return a low, a middle and a high layer, as EAGLE-3 does: the second, half way, the fourth last."""
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    return tuple(sorted({min(max(layer, 0), num_layers - 2) for layer in ids}))


def _draw(rng: np.random.Generator, *shape: int, scale: float = 0.02) -> NDArray[np.float32]:
    return (rng.standard_normal(shape) * scale).astype(np.float32)
