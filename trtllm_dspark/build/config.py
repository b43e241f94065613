"""What to build: one validated, immutable object."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_dspark.build._choices import BACKENDS, DTYPES, GPU_ARCHITECTURES, WEIGHT_DTYPES, Backend, WeightDtype
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """Inputs, output and limits of one build.

    Attributes:
        target_checkpoint: path of the target (GGUF file, Hugging Face directory, or `package:NAME`).
        draft_checkpoint: path of the DSpark drafter; None builds an engine that only decodes plainly.
        output_dir: engine directory to write.
        backend: compiler and runtime of the engine.
        weight_dtype: storage of the linear layers' weights; tensorrt_rtx: float16 or bfloat16, of everything.
        draft_weight_dtype: the same for the drafter; None = `weight_dtype`.
        max_batch_size: requests that decode at once.
        max_seq_len: tokens of a request, prompt and output together.
        max_num_tokens: tokens of one pass of the target, over all requests.
        max_draft_len: most draft tokens verified of one block; None = the drafter's block size.
        draft_vocab_size: vocabulary the drafter proposes from; None = all of it.
        draft_vocab_counts: token counts that choose the reduced vocabulary (docs/file_formats.md).
        gpu_architectures: what tensorrt_rtx compiles for, such as sm89.
        gpu_memory_gib: memory of the GPU in GiB that the engine must fit; None = only estimate.
        kv_cache_free_gpu_mem_fraction: part of what weights and activations leave free that caches may take.
        overwrite: replace an engine that stands in `output_dir`.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """

    target_checkpoint: str
    output_dir: Path
    draft_checkpoint: str | None = None
    backend: Backend = "onnxruntime"
    weight_dtype: WeightDtype = "int8"
    draft_weight_dtype: WeightDtype | None = None
    max_batch_size: int = 8
    max_seq_len: int = 2048
    max_num_tokens: int = 256
    max_draft_len: int | None = None
    draft_vocab_size: int | None = None
    draft_vocab_counts: Path | None = None
    gpu_architectures: tuple[str, ...] = ()
    gpu_memory_gib: float | None = None
    kv_cache_free_gpu_mem_fraction: float = 0.9
    overwrite: bool = False

    def __post_init__(self) -> None:
        _require_choice("backend", self.backend, BACKENDS)
        self._check_backend()
        _require_int("max_batch_size", self.max_batch_size, 1, 4096)
        _require_int("max_seq_len", self.max_seq_len, 2, 2**24)
        _require_int("max_num_tokens", self.max_num_tokens, 1, 2**20)
        if self.max_num_tokens < self.max_batch_size:
            raise ConfigError(
                f"--max_num_tokens {self.max_num_tokens} is below --max_batch_size {self.max_batch_size}; "
                "every request of a round needs at least one token"
            )
        if self.max_draft_len is not None:
            _require_int("max_draft_len", self.max_draft_len, 1, 64)
        if self.draft_vocab_size is not None:
            _require_int("draft_vocab_size", self.draft_vocab_size, 1, INT32_MAX)
        self._check_combinations()

    def _check_backend(self) -> None:
        if self.backend == "tensorrt_rtx":
            _require_choice("dtype", self.weight_dtype, DTYPES)
            if self.draft_weight_dtype is not None:
                raise ConfigError("--draft_weight_dtype is for onnxruntime; tensorrt_rtx builds both models in --dtype")
            if not self.gpu_architectures:
                raise ConfigError(
                    f"--backend tensorrt_rtx needs --gpu_architecture, some of {_list(GPU_ARCHITECTURES)}"
                )
            for name in self.gpu_architectures:
                _require_choice("gpu_architecture", name, GPU_ARCHITECTURES)
            if len(set(self.gpu_architectures)) != len(self.gpu_architectures):
                raise ConfigError("--gpu_architecture names one twice; name each once")
            if self.gpu_memory_gib is not None and not 0 < self.gpu_memory_gib < 2**20:
                raise ConfigError(f"--gpu_memory_gib must be above 0, got {self.gpu_memory_gib!r}")
            if not 0 < self.kv_cache_free_gpu_mem_fraction <= 1:
                raise ConfigError(
                    "--kv_cache_free_gpu_mem_fraction must be above 0 and at most 1, got "
                    f"{self.kv_cache_free_gpu_mem_fraction!r}"
                )
            return
        _require_choice("weight_dtype", self.weight_dtype, WEIGHT_DTYPES)
        if self.draft_weight_dtype is not None:
            _require_choice("draft_weight_dtype", self.draft_weight_dtype, WEIGHT_DTYPES)
        if self.gpu_architectures or self.gpu_memory_gib is not None:
            raise ConfigError("--gpu_architecture and --gpu_memory_gib need a GPU backend; add --backend tensorrt_rtx")

    def _check_combinations(self) -> None:
        if (self.draft_vocab_size is None) != (self.draft_vocab_counts is None):
            raise ConfigError(
                "--draft_vocab_size and --draft_vocab_counts belong together; give both or neither, "
                "the counts say which tokens to keep"
            )
        if self.draft_checkpoint is None:
            for name in ("draft_weight_dtype", "max_draft_len", "draft_vocab_size"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--{name} needs a drafter; add --draft_checkpoint or leave it out")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        fields = asdict(self)
        if self.backend == "onnxruntime":
            for name in ("gpu_architectures", "gpu_memory_gib", "kv_cache_free_gpu_mem_fraction"):
                del fields[name]
        return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}


def resolve_limits(config: BuildConfig, target: ModelConfig, drafter: DrafterConfig | None) -> BuildLimits:
    """Check the limits against the models and fill in the defaults that come from them.

    Raises:
        ConfigError: a limit does not fit the models.
    """
    if config.max_seq_len > target.max_position_embeddings:
        raise ConfigError(
            f"--max_seq_len {config.max_seq_len} exceeds the target's max_position_embeddings "
            f"{target.max_position_embeddings}; lower it"
        )
    gamma = 0
    if drafter is not None:
        gamma = drafter.block_size if config.max_draft_len is None else config.max_draft_len
        if gamma > drafter.block_size:
            raise ConfigError(
                f"--max_draft_len {gamma} exceeds the block of {drafter.block_size} tokens that the drafter was "
                "trained with; lower it or use another drafter"
            )
        if config.max_num_tokens < gamma + 1:
            raise ConfigError(
                f"--max_num_tokens {config.max_num_tokens} cannot hold one verified block of {gamma + 1} tokens; "
                "raise it or lower --max_draft_len"
            )
    return BuildLimits(config.max_batch_size, config.max_seq_len, config.max_num_tokens, gamma)


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"--{name} must be one of {_list(choices)}, got {value!r}")


def _list(choices: tuple[str, ...]) -> str:
    return ", ".join(choices)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"--{name} must be an integer from {low} to {high}, got {value!r}")
