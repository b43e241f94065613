"""Device memory of an engine before it is compiled, and whether it fits the GPU it is for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trtllm_dspark.build.estimate import DrafterParts, layer_weights
from trtllm_dspark.build.tensorrt_rtx.profiles import Profile, cache_len, engine_profiles
from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError

_HALF, _FLOAT = 2, 4
GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Estimated bytes on the device. Each plan holds its own weights: a shared embedding or head is counted twice."""

    target_weight_bytes: int
    drafter_weight_bytes: int
    target_kv_bytes: int
    drafter_kv_bytes: int
    activation_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of both models' caches."""
        return self.target_kv_bytes + self.drafter_kv_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return self.target_weight_bytes + self.drafter_weight_bytes + self.kv_bytes + self.activation_bytes

    def as_json(self) -> dict[str, int]:
        """Return the figures as plain JSON values."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def estimate_device_memory(limits: BuildLimits, target: ModelConfig, drafter: DrafterParts | None) -> DeviceMemory:
    """Estimate the device memory of an engine with 16-bit weights and caches.

    Args:
        limits: shapes of the engine.
        target: configuration of the target.
        drafter: the drafter as built.
    """
    block = 0 if drafter is None else drafter.config.block_size
    rows = limits.max_batch_size * cache_len(limits, block)
    features = 0 if drafter is None else drafter.config.feature_size
    return DeviceMemory(
        target_weight_bytes=_HALF * _target_weights(target, limits),
        drafter_weight_bytes=0 if drafter is None else _drafter_weight_bytes(drafter, target, limits),
        target_kv_bytes=rows * target.kv_bytes_per_token * _HALF // _FLOAT,
        drafter_kv_bytes=0 if drafter is None else rows * drafter.config.backbone.kv_bytes_per_token * _HALF // _FLOAT,
        activation_bytes=max(_activations(target, features, profile) for profile in engine_profiles(limits)),
    )


def check_device_memory(memory: DeviceMemory, gpu_memory_gib: float, kv_fraction: float) -> None:
    """Refuse an engine that does not fit its GPU.

    Args:
        memory: the estimate.
        gpu_memory_gib: memory of the GPU in GiB.
        kv_fraction: part of what weights and activations leave free that the caches may take.

    Raises:
        ConfigError: it does not fit; says by how much and which flags to lower.
    """
    free = int(gpu_memory_gib * GIB) - memory.total_bytes + memory.kv_bytes
    if free < 0:
        raise ConfigError(
            f"weights and activations take {(memory.total_bytes - memory.kv_bytes) / GIB:.2f} GiB, the GPU has "
            f"{gpu_memory_gib:g}; lower --max_num_tokens, or choose a smaller model or a larger GPU"
        )
    if memory.kv_bytes > kv_fraction * free:
        raise ConfigError(
            f"the caches take {memory.kv_bytes / GIB:.2f} GiB, {kv_fraction:g} of what weights and activations leave "
            f"of {gpu_memory_gib:g} GiB is {kv_fraction * free / GIB:.2f}; lower --max_batch_size or --max_seq_len"
        )


def _target_weights(model: ModelConfig, limits: BuildLimits) -> int:
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return layer_weights(model) + tables + limits.max_seq_len * model.head_dim


def _drafter_weight_bytes(parts: DrafterParts, target: ModelConfig, limits: BuildLimits) -> int:
    drafter, model = parts.config, parts.config.backbone
    context = model.num_layers * 2 * model.hidden_size * model.num_kv_heads * model.head_dim
    tables = model.vocab_size * model.hidden_size
    # A tied target's one table serves the block as embedding and head.
    if parts.own_embedding or parts.own_head or not target.tie_word_embeddings:
        tables += drafter.draft_vocab_size * model.hidden_size
    rope = 2 * (limits.max_seq_len + drafter.block_size) * model.head_dim
    return _HALF * (layer_weights(model) + context + tables + rope) + _FLOAT * drafter.feature_size * model.hidden_size


def _activations(model: ModelConfig, features: int, profile: Profile) -> int:
    """Bytes of one pass: inner layer, residual stream and projections per token, the padded view twice, the outputs."""
    heads = model.num_heads + 2 * model.num_kv_heads
    token = 3 * model.intermediate_size + 4 * model.hidden_size + heads * model.head_dim
    padded = profile.num_rows * profile.row_len * (heads + model.num_heads) * model.head_dim
    # Rotated queries of every layer are outputs and stay until the pass ends.
    padded += profile.num_rows * profile.row_len * model.num_layers * model.num_heads * model.head_dim
    outputs = profile.num_tokens * features + profile.num_logits * model.vocab_size
    return _HALF * (profile.num_tokens * token + padded) + (_HALF + _FLOAT) * outputs
