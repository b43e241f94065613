"""Write a drafter: DeepSpec's layout for block drafters, an own one for the others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.autoregressive import ARCHITECTURES
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.checkpoint.safetensors_io import write_file
from trtllm_dspark.errors import DeviceError

Array = NDArray[Any]

_PARTS = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_HEADS = {
    "embed.weight": "embed_tokens.weight",
    "markov.w1.weight": "markov_head.markov_w1.weight",
    "markov.w2.weight": "markov_head.markov_w2.weight",
    "markov.gate.weight": "markov_head.gate_proj.weight",
    "markov.gate.bias": "markov_head.gate_proj.bias",
    "markov.rnn.weight": "markov_head.joint_proj.weight",
    "markov.rnn.bias": "markov_head.joint_proj.bias",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}


def deepspec_name(name: str) -> str:
    """Return DeepSpec's name of a canonical one."""
    if name in _HEADS:
        return _HEADS[name]
    if not name.startswith("layers."):
        return name
    _, layer, part, kind = name.split(".")
    return f"layers.{layer}.{_PARTS[part]}.{kind}"


def deepspec_config(config: DrafterConfig, target: ModelConfig, *, num_anchors: int) -> dict[str, Any]:
    """Return the `config.json` that `Qwen3DSparkModel` reads."""
    model = config.backbone
    rope: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_type": "default"}
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    # Where a drafter has them; DeepSpec's have neither.
    further = {"target_hidden_size": config.target_hidden_size, "draft_vocab_size": config.draft_vocab_size}
    usual = {"target_hidden_size": model.hidden_size, "draft_vocab_size": model.vocab_size}
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": rope,
        "attention_bias": model.attention_bias,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * model.num_layers,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_ids[0] if target.eos_token_ids else None,
        "pad_token_id": target.pad_token_id,
        "initializer_range": 0.02,
        "dtype": "float16",
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": num_anchors,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla" if config.markov_head == "none" else config.markov_head,
        **{name: value for name, value in further.items() if value != usual[name]},
    }


def autoregressive_json(config: DrafterConfig, target: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of an autoregressive drafter (docs/checkpoints.md)."""
    values = deepspec_config(config, target, num_anchors=0)
    foreign = ("num_anchors", "mask_token_id", "enable_confidence_head", "confidence_head_with_markov", "markov_rank")
    for name in (*foreign, "markov_head_type"):
        del values[name]
    return {**values, "architectures": [name for name, kind in ARCHITECTURES.items() if kind == config.kind]}


def write_drafter(
    directory: Path,
    config: DrafterConfig,
    target: ModelConfig,
    arrays: Mapping[str, Array],
    *,
    num_anchors: int,
    shared: Mapping[str, Array] | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` (float16), each replaced whole.

    A block drafter is written in DeepSpec's layout, another kind in this project's own.

    Args:
        directory: created where needed.
        config: the drafter.
        target: its target.
        arrays: canonical names -> float arrays; a reduced vocabulary comes with `d2t`, target ids.
        num_anchors: blocks of a sequence in training, which DeepSpec's configuration wants to know.
        shared: the target's `embed.weight` and `lm_head.weight`, where copies of them are wanted in place of none.

    Raises:
        DeviceError: the disk is full or fails, or a weight does not fit float16.
    """
    tensors: dict[str, Array] = {}
    for name, values in {**(shared or {}), **arrays}.items():
        if name == "d2t":
            tensors[name] = np.asarray(values - np.arange(len(values)), np.int64)
            continue
        with np.errstate(over="ignore"):
            stored = np.asarray(values, np.float32).astype(np.float16)
        if not np.isfinite(stored).all():
            raise DeviceError(f"weight {name} does not fit float16; train with a smaller learning rate")
        tensors[deepspec_name(name)] = stored[None] if name == "confidence.weight" else stored
    own_layout = config.autoregressive
    fields = (
        autoregressive_json(config, target) if own_layout else deepspec_config(config, target, num_anchors=num_anchors)
    )
    text = json.dumps(fields, indent=2) + "\n"
    part = directory / "model.safetensors.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_file(part, tensors)
        os.replace(part, directory / "model.safetensors")
        config_part = directory / "config.json.part"
        config_part.write_text(text, "utf-8")
        os.replace(config_part, directory / "config.json")
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DeviceError(
            f"the drafter cannot be written to {directory} ({error.strerror}); free space and go on with --resume"
        ) from error
