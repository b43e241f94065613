"""Drafters in the layout of vLLM's speculators library: a nested transformer configuration and shifted layer ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint._drafter import build_drafter
from trtllm_dspark.checkpoint._hf_config import Fields
from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.checkpoint.types import DrafterCheckpoint
from trtllm_dspark.errors import CheckpointError

# The nested configuration leaves out what equals Qwen3Config's defaults, the outer one may leave out its own.
_NESTED_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_OUTER_DEFAULTS: dict[str, Any] = {
    "draft_vocab_size": 32000,
    "block_size": 8,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_OUTER = (*_OUTER_DEFAULTS, "target_hidden_size", "mask_token_id", "sample_from_anchor", "quantization_config")
_TIED = "tie_word_embeddings"
# How it was trained, for whom, and how to treat windows that this package refuses anyway.
_NEUTRAL = ("speculators_config", "speculators_version", "sliding_window_non_causal")
_TRAINING_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight")


def is_speculators(values: Mapping[str, Any]) -> bool:
    """Tell whether a drafter's configuration is speculators'."""
    return "speculators_model_type" in values


def load_speculators(
    directory: Path, values: Mapping[str, Any], target: ModelConfig, with_weights: bool = True
) -> DrafterCheckpoint:
    """Read a speculators DSpark drafter.

    Its layer ids count the embedding as 0, so they are one more than this package's; its `d2t` holds offsets.

    Raises:
        CheckpointError: the drafter is not DSpark, is not supported, or does not fit the target.
    """
    path = directory / "config.json"
    kind = values.get("speculators_model_type")
    if kind != "dspark":
        raise CheckpointError(f"{path}: speculators_model_type is {kind!r}, expected 'dspark', the only kind read")
    if not isinstance(values.get("sample_from_anchor"), bool):
        raise CheckpointError(
            f"{path} has no sample_from_anchor: such drafters are from before July 2026 and leave the anchor's slot "
            "untrained, which is not supported; if this one is newer, add the field as true"
        )
    nested = values.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: transformer_layer_config is {nested!r}, expected an object")
    Fields(path, nested).refuse_unless("model_type", ("qwen3",), "this backbone is")
    outer = {name: values[name] for name in _OUTER if values.get(name) is not None}
    unknown = {
        name: value
        for name, value in values.items()
        if name not in (*_OUTER, *_NEUTRAL, _TIED, "speculators_model_type", "transformer_layer_config")
    }
    layers = Fields(path, values).layer_ids("aux_hidden_state_layer_ids")
    unknown.pop("aux_hidden_state_layer_ids")
    if min(layers) < 1:
        raise CheckpointError(
            f"{path}: aux_hidden_state_layer_ids names {min(layers)} (the embedding output is 0), which is not "
            "supported; expected ids from 1"
        )
    flat = {
        **_NESTED_DEFAULTS,
        **{name: value for name, value in nested.items() if value is not None},
        **_OUTER_DEFAULTS,
        **unknown,
        **outer,
        "target_layer_ids": [layer - 1 for layer in layers],
        # Either of the two configurations may say so.
        **({_TIED: values[_TIED]} if values.get(_TIED) else {}),
    }
    ignore = _TRAINING_TENSORS
    return build_drafter(directory, Fields(path, flat), target, "speculators", ignore=ignore, with_weights=with_weights)
