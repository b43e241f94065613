"""Sizes of an engine before it is built: bytes on disk and of its caches, from the configurations alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from trtllm_dspark.build._choices import WeightDtype
from trtllm_dspark.checkpoint import autoregressive_shapes
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError

INT64_MAX = 2**63 - 1
# Bytes of one weight of a linear layer: 8-bit blocks of 64 carry one float32 scale, per-row int8 carries next to none.
BYTES_PER_WEIGHT: dict[WeightDtype, float] = {
    "int8": 1 + 4 / 64,
    "w8a8": 1.0,
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "int4": 0.5 + 2 / 128,
    "fp8": 1.0,
}


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """A drafter as built, with its reduced vocabulary, and the tables it does not share with the target."""

    config: DrafterConfig
    own_embedding: bool
    own_head: bool


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """Estimated bytes: weights on disk, caches in memory."""

    target_weight_bytes: int
    drafter_weight_bytes: int
    target_kv_bytes: int
    drafter_kv_bytes: int

    @property
    def disk_bytes(self) -> int:
        """Bytes of the engine directory."""
        return self.target_weight_bytes + self.drafter_weight_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and caches when the engine is loaded."""
        return self.disk_bytes + self.target_kv_bytes + self.drafter_kv_bytes

    def as_json(self) -> dict[str, int]:
        """Return the figures as plain JSON values."""
        return {**asdict(self), "disk_bytes": self.disk_bytes, "memory_bytes": self.memory_bytes}


def estimate_sizes(
    limits: BuildLimits,
    target: ModelConfig,
    drafter: DrafterParts | None,
    *,
    weight_dtype: WeightDtype,
    draft_weight_dtype: WeightDtype,
) -> SizeEstimate:
    """Estimate an engine's sizes.

    Args:
        limits: shapes of the engine.
        target: configuration of the target.
        drafter: the drafter and what it stores of its own.
        weight_dtype: storage of the target's linear layers.
        draft_weight_dtype: storage of the drafter's linear layers.

    Raises:
        ConfigError: a cache tensor has more bytes than a 64-bit size can hold.
    """
    rows = _cache_rows(limits)
    estimate = SizeEstimate(
        target_weight_bytes=_target_bytes(target, weight_dtype) + _rope_bytes(target, limits),
        drafter_weight_bytes=0
        if drafter is None
        else _drafter_bytes(drafter, draft_weight_dtype) + 2 * _rope_bytes(drafter.config.backbone, limits),
        target_kv_bytes=rows * target.kv_bytes_per_token,
        drafter_kv_bytes=0 if drafter is None else rows * drafter.config.backbone.kv_bytes_per_token,
    )
    if estimate.memory_bytes > INT64_MAX:
        raise ConfigError(
            f"--max_batch_size {limits.max_batch_size} times --max_seq_len {limits.max_seq_len} needs more memory than "
            "can be addressed; lower one"
        )
    return estimate


def _cache_rows(limits: BuildLimits) -> int:
    # The padded view writes up to the widest row of a pass behind the last position (a pass may be one prefill chunk).
    return limits.max_batch_size * (limits.max_seq_len + limits.max_num_tokens)


def _rope_bytes(model: ModelConfig, limits: BuildLimits) -> int:
    """Cosine and sine tables of one graph, float32."""
    return limits.max_seq_len * model.head_dim * 4


def layer_weights(model: ModelConfig) -> int:
    """Return the weights of all decoder layers."""
    heads = model.num_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * heads * model.head_dim + model.num_heads * model.head_dim * model.hidden_size
    return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


def count_parameters(model: ModelConfig) -> int:
    """Return the parameters of a target: tables, layers, norms and biases; a tied table counts once."""
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return tables + layer_weights(model) + _small_weights(model)


def count_drafter_parameters(drafter: DrafterConfig) -> int:
    """Return the parameters of a drafter without embedding and output head, which are its target's."""
    model, rank = drafter.backbone, drafter.markov_rank
    if drafter.autoregressive:
        return sum(math.prod(shape) for shape in autoregressive_shapes(drafter).values())
    count = layer_weights(model) + _small_weights(model)
    count += drafter.feature_size * model.hidden_size + model.hidden_size
    if drafter.markov_head != "none":
        count += (model.vocab_size + drafter.draft_vocab_size) * rank
    if drafter.markov_head == "gated":
        count += rank * (model.hidden_size + rank + 1)
    if drafter.markov_head == "rnn":
        count += 3 * rank * (2 * rank + model.hidden_size + 1)
    if drafter.confidence:
        count += model.hidden_size + (rank if drafter.confidence_with_markov else 0) + 1
    return count


def _small_weights(model: ModelConfig) -> int:
    """Norms and biases of all layers, and the last norm."""
    layer = 2 * model.hidden_size + (2 * model.head_dim if model.qk_norm else 0)
    if model.attention_bias:
        layer += (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return model.num_layers * layer + model.hidden_size


def _target_bytes(target: ModelConfig, dtype: WeightDtype) -> int:
    embedding = target.vocab_size * target.hidden_size
    matrices = layer_weights(target) + embedding * (1 if target.tie_word_embeddings else 2)
    return int(matrices * BYTES_PER_WEIGHT[dtype])


def _drafter_bytes(parts: DrafterParts, dtype: WeightDtype) -> int:
    drafter, model = parts.config, parts.config.backbone
    if drafter.autoregressive:
        shapes = autoregressive_shapes(drafter)
        weights = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
        # Both graphs make keys and values, the step graph of `eagle3` leaves out `fc`.
        twice = ("eh_proj.weight", "layers.0.k.weight", "layers.0.v.weight")
        weights += sum(math.prod(shapes[name]) for name in twice if name in shapes)
        weights += drafter.draft_vocab_size * model.hidden_size if parts.own_head else 0
        return int(weights * BYTES_PER_WEIGHT[dtype])
    weights = layer_weights(model) + drafter.feature_size * model.hidden_size
    # The context graph repeats the key and value projections of the block graph.
    weights += model.num_layers * 2 * model.hidden_size * model.num_kv_heads * model.head_dim
    if parts.own_embedding:
        weights += model.vocab_size * model.hidden_size
    if parts.own_head:
        weights += drafter.draft_vocab_size * model.hidden_size
    if drafter.markov_head != "none":
        weights += (model.vocab_size + drafter.draft_vocab_size) * drafter.markov_rank
    return int(weights * BYTES_PER_WEIGHT[dtype])
