"""Autoregressive drafters: an EAGLE-3-style head and an MTP-1 head, in this project's own layout.

Both are one decoder layer over pairs of a target feature and the token behind it, and share the target's embedding and
output head. Sources: Li et al. 2025, EAGLE-3; DeepSeek-AI 2024, DeepSeek-V3, section 2.2. Layout: docs/checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint._drafter import check_fit, refuse_tied_to_target, refuse_unknown_fields
from trtllm_dspark.checkpoint._hf_config import Fields, parse_model_config
from trtllm_dspark.checkpoint._mapping import LAYER_NAMES, TensorMapper, layer_shapes
from trtllm_dspark.checkpoint.arrays import LazyArrays
from trtllm_dspark.checkpoint.config import DrafterConfig, DrafterKind, ModelConfig
from trtllm_dspark.checkpoint.safetensors_io import read_directory
from trtllm_dspark.checkpoint.types import CheckpointFile, DrafterCheckpoint
from trtllm_dspark.errors import CheckpointError

ARCHITECTURES: dict[str, DrafterKind] = {"Qwen3Eagle3Drafter": "eagle3", "Qwen3MtpDrafter": "mtp"}
"""Name in `config.json` -> kind."""
_UNDERSTOOD = frozenset(
    """
    attention_bias block_size bos_token_id eos_token_id head_dim hidden_act hidden_size intermediate_size layer_types
    max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads num_target_layers
    pad_token_id partial_rotary_factor rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
    target_layer_ids tie_word_embeddings use_sliding_window vocab_size
    """.split()
)


def load_autoregressive(
    directory: Path, values: Mapping[str, Any], target: ModelConfig, with_weights: bool = True
) -> DrafterCheckpoint:
    """Read an autoregressive drafter.

    Raises:
        CheckpointError: the drafter is incomplete, has an unknown field, or does not fit the target.
    """
    fields = Fields(directory / "config.json", values)
    refuse_unknown_fields(fields, _UNDERSTOOD)
    kind = ARCHITECTURES[fields.names("architectures")[0]]
    config = _config(fields, kind, target)
    check_fit(fields.path, config, target)
    if not with_weights:
        return DrafterCheckpoint(config, LazyArrays({}), (CheckpointFile(fields.path),), kind)
    stored, paths = read_directory(directory)
    mapper = TensorMapper(directory, {name: tensor.lazy() for name, tensor in stored.items()})
    for name, shape in autoregressive_shapes(config).items():
        mapper.take(stored_name(name), name, shape)
    files = tuple(CheckpointFile(path) for path in (fields.path, *paths))
    return DrafterCheckpoint(config, mapper.finish(), files, kind)


def autoregressive_config(
    kind: DrafterKind,
    target: ModelConfig,
    *,
    block_size: int,
    target_layer_ids: tuple[int, ...],
    draft_vocab_size: int,
) -> DrafterConfig:
    """Return the configuration of a drafter whose layer has the target's shapes."""
    backbone = replace(target, architecture="qwen3", num_layers=1, qk_norm=True, tie_word_embeddings=False)
    return _of(kind, backbone, target.num_layers, block_size, target_layer_ids, draft_vocab_size)


def autoregressive_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a drafter's tensors by canonical name.

    `eagle3` projects its features with `fc`, and its attention reads both halves of a pair side by side; `mtp` joins
    them with `eh_proj` in front of an ordinary layer.
    """
    size, layer = config.backbone.hidden_size, layer_shapes(config.backbone)
    shapes: dict[str, tuple[int, ...]] = {name: (size,) for name in ("embed_norm.weight", "hidden_norm.weight")}
    if config.kind == "eagle3":
        shapes["fc.weight"] = (size, config.feature_size)
        del layer["attn_norm.weight"]
        layer |= {f"{part}.weight": (layer[f"{part}.weight"][0], 2 * size) for part in "qkv"}
    else:
        shapes["eh_proj.weight"] = (size, 2 * size)
    return {**shapes, **{f"layers.0.{name}": shape for name, shape in layer.items()}, "norm.weight": (size,)}


def stored_name(canonical: str) -> str:
    """Return a tensor's name in the file."""
    prefix = "layers.0."
    return prefix + LAYER_NAMES[canonical[len(prefix) :]] if canonical.startswith(prefix) else canonical


def _config(fields: Fields, kind: DrafterKind, target: ModelConfig) -> DrafterConfig:
    path, backbone = fields.path, parse_model_config(fields, "qwen3")
    layers, gamma = fields.layer_ids("target_layer_ids"), fields.integer("block_size")
    if backbone.num_layers != 1:
        raise CheckpointError(f"{path}: num_hidden_layers is {backbone.num_layers}; such a drafter has one layer")
    if backbone.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{path}: hidden_size is {backbone.hidden_size} and the target's {target.hidden_size}, whose embedding and "
            "output head it shares; pass the target it was trained for"
        )
    if kind == "mtp" and (len(layers), gamma) != (1, 1):
        raise CheckpointError(
            f"{path}: an MTP-1 head has one layer in target_layer_ids and a block_size of 1, got {list(layers)} and "
            f"{gamma}"
        )
    if backbone.tie_word_embeddings:
        refuse_tied_to_target(path, target)
    num_target_layers = fields.integer("num_target_layers", target.num_layers)
    return _of(kind, replace(backbone, tie_word_embeddings=False), num_target_layers, gamma, layers, target.vocab_size)


def _of(
    kind: DrafterKind,
    backbone: ModelConfig,
    num_target_layers: int,
    block_size: int,
    target_layer_ids: tuple[int, ...],
    draft_vocab_size: int,
) -> DrafterConfig:
    return DrafterConfig(
        backbone=backbone,
        block_size=block_size,
        target_layer_ids=target_layer_ids,
        num_target_layers=num_target_layers,
        target_hidden_size=backbone.hidden_size,
        mask_token_id=0,
        markov_head="none",
        markov_rank=0,
        confidence=False,
        confidence_with_markov=False,
        draft_vocab_size=draft_vocab_size,
        kind=kind,
    )
