"""Device memory of an engine before it is compiled, and whether it fits the GPU it is for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trtllm_dspark.build._choices import WeightDtype
from trtllm_dspark.build.config import Precision
from trtllm_dspark.build.estimate import BYTES_PER_WEIGHT, DrafterParts, layer_weights
from trtllm_dspark.build.tensorrt.profiles import Profile, cache_len, engine_profiles
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError

_HALF, _FLOAT = 2, 4
GIB = 2**30
# A captured kernel with its parameters and dependencies takes about this much device memory.
_GRAPH_BYTES_PER_KERNEL = 8 << 10
# Kernels of a decoder layer after fusion: two norms, four products, rotation and update, attention, activation.
_KERNELS_PER_LAYER = 12
KV_SPLIT = 512
"""Positions one piece of the attention plugin covers."""
WEIGHT_BYTES: dict[WeightDtype, float] = {
    "int8": 1.0,
    # One 16-bit scale a block of 128.
    "int4": 0.5 + 2 / 128,
    "fp8": 1.0,
    "float16": BYTES_PER_WEIGHT["float16"],
    "bfloat16": BYTES_PER_WEIGHT["bfloat16"],
}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Estimated bytes on the device. Each plan holds its own weights: a shared embedding or head is counted twice."""

    target_weight_bytes: int
    drafter_weight_bytes: int
    target_kv_bytes: int
    drafter_kv_bytes: int
    activation_bytes: int
    attention_workspace_bytes: int
    graph_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of both models' caches."""
        return self.target_kv_bytes + self.drafter_kv_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return sum(asdict(self).values())

    def as_json(self) -> dict[str, int]:
        """Return the figures as plain JSON values."""
        return {**asdict(self), "total_bytes": self.total_bytes}


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What the memory of an engine follows from.

    Attributes:
        limits: shapes of the engine.
        target: configuration of the target.
        drafter: the drafter as built.
        precision: of the target.
        draft_precision: of the drafter.
        plugins: attention works on packed rows with a workspace of its own instead of the padded view.
    """

    limits: BuildLimits
    target: ModelConfig
    drafter: DrafterParts | None
    precision: Precision = Precision("float16", "float16")
    draft_precision: Precision = Precision("float16", "float16")
    plugins: bool = False

    def estimate(self) -> DeviceMemory:
        """Estimate every part; caches hold 16-bit values."""
        drafter = None if self.drafter is None else self.drafter.config
        rows = self.limits.max_batch_size * self.cache_length
        profiles = engine_profiles(self.limits)
        return DeviceMemory(
            target_weight_bytes=self._target_weights(),
            drafter_weight_bytes=0 if self.drafter is None else self._drafter_weights(self.drafter),
            target_kv_bytes=rows * self.target.kv_bytes_per_token * _HALF // _FLOAT,
            drafter_kv_bytes=0 if drafter is None else rows * drafter.backbone.kv_bytes_per_token * _HALF // _FLOAT,
            activation_bytes=max(self._activations(profile) for profile in profiles) + self._block_outputs(drafter),
            attention_workspace_bytes=max(self._workspace(profile) for profile in profiles) if self.plugins else 0,
            graph_bytes=self._graphs(drafter),
        )

    @property
    def cache_length(self) -> int:
        """Positions of a slot."""
        return cache_len(self.limits, 0 if self.drafter is None else self.drafter.config.block_size, self.plugins)

    def _target_weights(self) -> int:
        model = self.target
        tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
        rope = self.limits.max_seq_len * model.head_dim
        return int(layer_weights(model) * WEIGHT_BYTES[self.precision.weight_dtype]) + _HALF * (tables + rope)

    def _drafter_weights(self, parts: DrafterParts) -> int:
        drafter, model = parts.config, parts.config.backbone
        # The context's plan repeats the key and value projections of the block's.
        context = model.num_layers * 2 * model.hidden_size * model.num_kv_heads * model.head_dim
        tables = model.vocab_size * model.hidden_size
        # A tied target's one table serves the block as embedding and head.
        if parts.own_embedding or parts.own_head or not self.target.tie_word_embeddings:
            tables += drafter.draft_vocab_size * model.hidden_size
        rope = 2 * (self.limits.max_seq_len + drafter.block_size) * model.head_dim
        layers = (layer_weights(model) + context) * WEIGHT_BYTES[self.draft_precision.weight_dtype]
        single = drafter.feature_size * model.hidden_size
        return int(layers) + _HALF * (tables + rope) + _FLOAT * single + self._head_bytes(drafter)

    def _head_bytes(self, drafter: DrafterConfig) -> int:
        """Bytes of the Markov factors: int8 beside narrow weights, the graph's type in a plugin, else float32."""
        if drafter.markov_head == "none":
            return 0
        rows = drafter.backbone.vocab_size + drafter.draft_vocab_size
        narrow = self.draft_precision.weight_dtype != self.draft_precision.dtype
        element = 1 if narrow else _HALF if self.plugins else _FLOAT
        return rows * (drafter.markov_rank * element + (_FLOAT if narrow else 0))

    def _activations(self, profile: Profile) -> int:
        """Bytes of one pass: inner layer, residual stream and projections per token, the padded view, the outputs."""
        model = self.target
        features = 0 if self.drafter is None else self.drafter.config.feature_size
        heads = model.num_heads + 2 * model.num_kv_heads
        token = 3 * model.intermediate_size + 4 * model.hidden_size + heads * model.head_dim
        padded = 0
        if not self.plugins:
            padded = profile.num_rows * profile.row_len * (heads + model.num_heads) * model.head_dim
            # Rotated queries of every layer are outputs and stay until the pass ends.
            padded += profile.num_rows * profile.row_len * model.num_layers * model.num_heads * model.head_dim
        outputs = profile.num_tokens * features + profile.num_logits * model.vocab_size
        return _HALF * (profile.num_tokens * token + padded) + (_HALF + _FLOAT) * outputs

    def _block_outputs(self, drafter: DrafterConfig | None) -> int:
        """Bytes of base logits, draft logits [R, gamma, Vd] and hidden states [R, gamma, d], float32."""
        if drafter is None:
            return 0
        width = 2 * drafter.draft_vocab_size + drafter.backbone.hidden_size
        return self.limits.max_batch_size * self.limits.max_draft_len * width * _FLOAT

    def _workspace(self, profile: Profile) -> int:
        """Bytes of the attention plugin's partial results, float32 [pieces, T, Hq, D + 2]; none for one piece."""
        pieces = -(-self.cache_length // KV_SPLIT)
        model = self.target
        return 0 if pieces == 1 else pieces * profile.num_tokens * model.num_heads * (model.head_dim + 2) * _FLOAT

    def _graphs(self, drafter: DrafterConfig | None) -> int:
        """Bytes of the captured graphs: one a power of two of requests and a number of tokens each."""
        requests = self.limits.max_batch_size.bit_length() + 1
        layers = self.target.num_layers + (0 if drafter is None else 2 * drafter.backbone.num_layers)
        captures = requests * (self.limits.max_draft_len + 1)
        return captures * layers * _KERNELS_PER_LAYER * _GRAPH_BYTES_PER_KERNEL


def check_device_memory(memory: DeviceMemory, gpu_memory_bytes: int, kv_fraction: float) -> None:
    """Refuse an engine that does not fit its GPU.

    Args:
        memory: the estimate.
        gpu_memory_bytes: memory of the GPU.
        kv_fraction: part of what everything else leaves free that the caches may take.

    Raises:
        ConfigError: it does not fit; says by how much and which flags to lower.
    """
    free = gpu_memory_bytes - memory.total_bytes + memory.kv_bytes
    size = f"{gpu_memory_bytes / GIB:.4g}"
    if free < 0:
        raise ConfigError(
            f"weights, activations and graphs take {(memory.total_bytes - memory.kv_bytes) / GIB:.2f} GiB, the GPU has "
            f"{size}; lower --max_num_tokens, store weights as --weight_dtype int8 or int4, or choose a smaller model "
            "or a larger GPU"
        )
    if memory.kv_bytes > kv_fraction * free:
        raise ConfigError(
            f"the caches take {memory.kv_bytes / GIB:.2f} GiB, {kv_fraction:g} of what everything else leaves of "
            f"{size} GiB is {kv_fraction * free / GIB:.2f}; lower --max_batch_size or --max_seq_len"
        )
