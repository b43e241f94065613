"""Targets stored as GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.checkpoint._gguf import GgufFile, read_gguf
from trtllm_dspark.checkpoint._gguf_tokenizer import end_ids, read_tokenizer, special_id
from trtllm_dspark.checkpoint._mapping import TensorMapper, layer_shapes
from trtllm_dspark.checkpoint.arrays import Array
from trtllm_dspark.checkpoint.config import Architecture, ModelConfig
from trtllm_dspark.checkpoint.types import Checkpoint, CheckpointFile
from trtllm_dspark.errors import CheckpointError

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen3": "qwen3"}

LAYER_NAMES = {
    "attn_norm.weight": "attn_norm.weight",
    "q.weight": "attn_q.weight",
    "k.weight": "attn_k.weight",
    "v.weight": "attn_v.weight",
    "q.bias": "attn_q.bias",
    "k.bias": "attn_k.bias",
    "v.bias": "attn_v.bias",
    "o.weight": "attn_output.weight",
    "q_norm.weight": "attn_q_norm.weight",
    "k_norm.weight": "attn_k_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "gate.weight": "ffn_gate.weight",
    "up.weight": "ffn_up.weight",
    "down.weight": "ffn_down.weight",
}
"""Canonical name of a layer's tensor -> its name below `blk.{l}.` in GGUF files."""


def load_gguf(path: Path) -> Checkpoint:
    """Read a Llama or Qwen3 target from a GGUF file.

    Raises:
        CheckpointError: the file is damaged or holds something this package does not run.
    """
    file = read_gguf(path)
    config = _config(file)
    mapper = TensorMapper(path, file.tensors)
    vocab_shape = (config.vocab_size, config.hidden_size)
    mapper.take("token_embd.weight", "embed.weight", vocab_shape)
    for layer in range(config.num_layers):
        for name, shape in layer_shapes(config).items():
            source, canonical = f"blk.{layer}.{LAYER_NAMES[name]}", f"layers.{layer}.{name}"
            rotated = config.architecture == "llama" and name.split(".")[0] in ("q", "k")
            mapper.take(source, canonical, shape, _half_split(config.head_dim) if rotated else None)
    mapper.take("output_norm.weight", "norm.weight", (config.hidden_size,))
    if not config.tie_word_embeddings:
        mapper.take("output.weight", "lm_head.weight", vocab_shape)
    tokenizer = read_tokenizer(path, file.metadata)
    return Checkpoint(config, mapper.finish(), (CheckpointFile(path),), tokenizer, "gguf")


def _half_split(head_dim: int) -> Callable[[Array], Array]:
    """Return the function that puts the rows of q or k from ggml's rotary order into the half-split order.

    ggml rotates neighbouring rows (2i, 2i+1) of a head, this package rows (i, i + head_dim / 2).
    """

    def convert(values: Array) -> Array:
        pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)

    return convert


class _Metadata:
    """Typed access to `{architecture}.*` fields."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self._file, self._prefix = file, prefix

    def get(self, name: str) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{name}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._file.path}: {self._prefix}.{name} is {value!r}, expected one positive integer for all layers"
            )
        return value

    def number(self, name: str, default: float) -> float:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, float) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self._file.path}: {self._prefix}.{name} is {value!r}, expected a positive number")
        # Stored as float32: take the shortest decimal that means the same float32.
        return float(str(np.float32(value)))


def _config(file: GgufFile) -> ModelConfig:
    name = file.metadata.get("general.architecture")
    architecture = _ARCHITECTURES.get(str(name))
    if architecture is None:
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not supported as a target, expected {' or '.join(_ARCHITECTURES)}"
        )
    values = _Metadata(file, architecture)
    hidden_size, num_heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    _refuse_unsupported(file, values, head_dim)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks tensor token_embd.weight; the checkpoint is incomplete")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=values.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=values.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=values.number("rope.freq_base", 10000.0),
        max_position_embeddings=values.integer("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        qk_norm=architecture == "qwen3",
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        bos_token_id=special_id(file.path, file.metadata, "bos"),
        eos_token_ids=end_ids(file.path, file.metadata),
        pad_token_id=special_id(file.path, file.metadata, "padding"),
    )


def _refuse_unsupported(file: GgufFile, values: _Metadata, head_dim: int) -> None:
    def refuse(what: str) -> None:
        raise CheckpointError(f"{file.path}: {what}; use a Hugging Face directory of the model or another model")

    if values.get("rope.scaling.type") not in (None, "none"):
        refuse(f"rope scaling {values.get('rope.scaling.type')!r} is not supported in GGUF files")
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        # Without a type a factor means linear scaling; 0 and 1 scale nothing.
        if values.get("rope.scaling.type") is None and values.get(name) not in (None, 0, 1):
            refuse(f"linear rope scaling ({name} {values.get(name)!r}) is not supported in GGUF files")
    if "rope_freqs.weight" in file.tensors:
        refuse("tensor rope_freqs.weight (scaled rotary frequencies) is not supported in GGUF files")
    if values.get("rope.dimension_count") not in (None, head_dim):
        refuse(f"rotary embedding of {values.get('rope.dimension_count')} of {head_dim} dimensions is not supported")
    if values.get("attention.value_length") not in (None, head_dim):
        refuse("values and keys of different width are not supported")
    if values.get("attention.sliding_window"):
        refuse("sliding-window attention is not supported")
    if values.get("expert_count"):
        refuse("mixture-of-experts models are not supported")
    if file.metadata.get("general.type", "model") != "model":
        refuse(f"the file is of type {file.metadata['general.type']!r}, not a model (merge an adapter into its base)")
    if file.metadata.get("split.count", 1) not in (0, 1):
        refuse("the model is split over several GGUF files, which is not supported (merge them with gguf-split)")
