"""Tiny random targets and drafters, written to disk in the layouts users have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trtllm_dspark.checkpoint.safetensors_io import write_file

Array = npt.NDArray[Any]
StoredDtype = Literal["F32", "F16", "BF16"]

TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""Every inner dimension is a multiple of 64, so that all weight formats apply."""


def write_target(
    directory: Path,
    *,
    architecture: Literal["llama", "qwen3"] = "llama",
    seed: int = 0,
    dtype: StoredDtype = "F32",
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a random Hugging Face target and return `directory`.

    Args:
        directory: created if needed.
        architecture: family of the target.
        seed: seed of the weights.
        dtype: type of the stored weights.
        num_shards: number of safetensors files; more than one come with an index.
        overrides: fields of `config.json` in place of TINY_SHAPE's.
    """
    config = {
        "architectures": ["LlamaForCausalLM" if architecture == "llama" else "Qwen3ForCausalLM"],
        "model_type": architecture,
        **TINY_SHAPE,
        **overrides,
    }
    rng = np.random.default_rng(seed)
    shape = (config["vocab_size"], config["hidden_size"])
    tensors = {"model.embed_tokens.weight": _matrix(rng, *shape), "model.norm.weight": _gain(rng, shape[1])}
    for layer in range(config["num_hidden_layers"]):
        tensors |= layer_tensors(rng, config, f"model.layers.{layer}.", qk_norm=architecture == "qwen3")
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _matrix(rng, *shape)
    return write_directory(directory, config, tensors, dtype=dtype, num_shards=num_shards)


def write_drafter(
    directory: Path,
    *,
    markov_head: Literal["none", "vanilla", "gated", "rnn"] = "vanilla",
    confidence: bool = True,
    confidence_with_markov: bool = True,
    own_embed: bool = False,
    own_lm_head: bool = False,
    seed: int = 1,
    dtype: StoredDtype = "F32",
    **overrides: Any,
) -> Path:
    """Write a random DeepSpec drafter for a target of TINY_SHAPE and return `directory`.

    Args:
        directory: created if needed.
        markov_head: kind of sequential head.
        confidence: whether there is a confidence head.
        confidence_with_markov: whether the confidence head sees the previous token's Markov embedding.
        own_embed: store an embedding of its own instead of sharing the target's.
        own_lm_head: store an output head of its own instead of sharing the target's.
        seed: seed of the weights.
        dtype: type of the stored weights.
        overrides: fields of `config.json`.
    """
    config = drafter_config(
        markov_rank=0 if markov_head == "none" else 32,
        markov_head_type=None if markov_head == "none" else markov_head,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence_with_markov and markov_head != "none",
        **overrides,
    )
    return write_directory(
        directory, config, drafter_tensors(config, seed, own_embed=own_embed, own_lm_head=own_lm_head), dtype=dtype
    )


def drafter_config(**overrides: Any) -> dict[str, Any]:
    """Return the `config.json` of a DeepSpec drafter that fits a target of TINY_SHAPE."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **TINY_SHAPE,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
        "num_target_layers": TINY_SHAPE["num_hidden_layers"],
        "target_layer_ids": [0, 2],
        "block_size": 5,
        "mask_token_id": 3,
        "num_anchors": 512,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **overrides,
    }


def drafter_tensors(
    config: Mapping[str, Any],
    seed: int,
    *,
    own_embed: bool = False,
    own_lm_head: bool = False,
    draft_vocab_size: int | None = None,
) -> dict[str, Array]:
    """Return random tensors for a drafter's configuration, named as DeepSpec names them."""
    rng = np.random.default_rng(seed)
    size, vocab, rank = config["hidden_size"], config["vocab_size"], config["markov_rank"]
    draft_vocab = vocab if draft_vocab_size is None else draft_vocab_size
    tensors = {
        "fc.weight": _matrix(rng, size, size * len(config["target_layer_ids"])),
        "hidden_norm.weight": _gain(rng, size),
        "norm.weight": _gain(rng, size),
    }
    for layer in range(config["num_hidden_layers"]):
        tensors |= layer_tensors(rng, config, f"layers.{layer}.", qk_norm=True)
    if rank:
        tensors["markov_head.markov_w1.weight"] = _matrix(rng, vocab, rank) * 2
        tensors["markov_head.markov_w2.weight"] = _matrix(rng, draft_vocab, rank) * 2
    extra = {"gated": ("gate_proj", rank, size + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + size)}
    if config["markov_head_type"] in extra:
        name, rows, columns = extra[config["markov_head_type"]]
        tensors[f"markov_head.{name}.weight"] = _matrix(rng, rows, columns)
        tensors[f"markov_head.{name}.bias"] = _matrix(rng, 1, rows)[0]
    if config["enable_confidence_head"]:
        width = size + (rank if config["confidence_head_with_markov"] else 0)
        tensors["confidence_head.proj.weight"] = _matrix(rng, 1, width)
        tensors["confidence_head.proj.bias"] = np.full(1, 0.5, np.float32)
    if own_embed:
        tensors["embed_tokens.weight"] = _matrix(rng, vocab, size)
    if own_lm_head:
        tensors["lm_head.weight"] = _matrix(rng, draft_vocab, size)
    return tensors


def layer_tensors(
    rng: np.random.Generator, config: Mapping[str, Any], prefix: str, *, qk_norm: bool
) -> dict[str, Array]:
    """Return the random tensors of one decoder layer."""
    size, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors = {
        "input_layernorm.weight": _gain(rng, size),
        "self_attn.q_proj.weight": _matrix(rng, q_size, size),
        "self_attn.k_proj.weight": _matrix(rng, kv_size, size),
        "self_attn.v_proj.weight": _matrix(rng, kv_size, size),
        "self_attn.o_proj.weight": _matrix(rng, size, q_size),
        "post_attention_layernorm.weight": _gain(rng, size),
        "mlp.gate_proj.weight": _matrix(rng, ffn, size),
        "mlp.up_proj.weight": _matrix(rng, ffn, size),
        "mlp.down_proj.weight": _matrix(rng, size, ffn),
    }
    if qk_norm:
        tensors |= {f"self_attn.{name}_norm.weight": _gain(rng, head_dim) for name in ("q", "k")}
    if config["attention_bias"]:
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"self_attn.{name}_proj.bias"] = _matrix(rng, 1, rows)[0]
    return {prefix + name: values for name, values in tensors.items()}


def write_directory(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Array],
    *,
    dtype: StoredDtype = "F32",
    num_shards: int = 1,
) -> Path:
    """Write `config.json` and the tensors; integer tensors keep their type."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    floats = frozenset(name for name, values in tensors.items() if values.dtype == np.float32)
    stored = {name: _convert(values, dtype) if name in floats else values for name, values in tensors.items()}
    bfloat16 = floats if dtype == "BF16" else frozenset()
    if num_shards == 1:
        write_file(directory / "model.safetensors", stored, bfloat16=bfloat16)
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        names = sorted(stored)[shard::num_shards]
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        write_file(directory / file_name, {name: stored[name] for name in names}, bfloat16=bfloat16)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return directory


def _convert(values: Array, dtype: StoredDtype) -> Array:
    if dtype == "F16":
        return values.astype(np.float16)
    if dtype == "BF16":
        # Cutting off the lower half is a valid bfloat16 rounding; which one does not matter here.
        bits: Array = np.right_shift(values.view(np.uint32), 16).astype(np.uint16)
        return bits
    return values


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def _gain(rng: np.random.Generator, size: int) -> Array:
    return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)
