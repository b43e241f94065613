"""What to build: one validated, immutable object."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from trtllm_dspark.build._choices import (
    BACKENDS,
    DTYPES,
    FP8_ARCHITECTURES,
    GPU_ARCHITECTURES,
    GPU_BACKENDS,
    WEIGHT_DTYPES,
    Backend,
    Dtype,
    WeightDtype,
)
from trtllm_dspark.build.gpu_options import GpuOptions, require_choice, require_int
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Precision:
    """What one model's graphs compute in, and how their linear layers are stored: that type, or a narrower format."""

    dtype: Literal["float32", "float16", "bfloat16"]
    weight_dtype: WeightDtype


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """Inputs, output and limits of one build.

    Attributes:
        target_checkpoint: path of the target (GGUF file, Hugging Face directory, or `package:NAME`).
        draft_checkpoint: path of the DSpark drafter; None builds an engine that only decodes plainly.
        output_dir: engine directory to write.
        backend: compiler and runtime of the engine.
        weight_dtype: storage of the linear layers; None = int8 on ONNX Runtime, the engine's type on a GPU.
        draft_weight_dtype: the same for the drafter; see `draft_precision`.
        max_batch_size: requests that decode at once.
        max_seq_len: tokens of a request, prompt and output together.
        max_num_tokens: tokens of one pass of the target, over all requests.
        max_draft_len: most draft tokens verified of one block; None = the drafter's block size.
        draft_vocab_size: vocabulary the drafter proposes from; None = all of it.
        draft_vocab_counts: token counts that choose the reduced vocabulary (docs/file_formats.md).
        gpu: options of the GPU backends.
        overwrite: replace an engine that stands in `output_dir`.
        weights_optional: configurations alone will do; such a build can be planned, not carried out.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """

    target_checkpoint: str
    output_dir: Path
    draft_checkpoint: str | None = None
    backend: Backend = "onnxruntime"
    weight_dtype: WeightDtype | None = None
    draft_weight_dtype: WeightDtype | None = None
    max_batch_size: int = 8
    max_seq_len: int = 2048
    max_num_tokens: int = 256
    max_draft_len: int | None = None
    draft_vocab_size: int | None = None
    draft_vocab_counts: Path | None = None
    gpu: GpuOptions = GpuOptions()
    overwrite: bool = False
    weights_optional: bool = False

    def __post_init__(self) -> None:
        require_choice("backend", self.backend, BACKENDS)
        self._check_precision()
        self.gpu.check(self.backend)
        self.check_architectures(self.gpu.named_architectures)
        require_int("max_batch_size", self.max_batch_size, 1, 4096)
        require_int("max_seq_len", self.max_seq_len, 2, 2**24)
        require_int("max_num_tokens", self.max_num_tokens, 1, 2**20)
        if self.max_num_tokens < self.max_batch_size:
            raise ConfigError(
                f"--max_num_tokens {self.max_num_tokens} is below --max_batch_size {self.max_batch_size}; "
                "every request of a round needs at least one token"
            )
        if self.max_draft_len is not None:
            require_int("max_draft_len", self.max_draft_len, 1, 64)
        if self.draft_vocab_size is not None:
            require_int("draft_vocab_size", self.draft_vocab_size, 1, INT32_MAX)
        if self.gpu.opt_num_tokens is not None and self.gpu.opt_num_tokens > self.max_num_tokens:
            raise ConfigError(
                f"--opt_num_tokens {self.gpu.opt_num_tokens} exceeds --max_num_tokens {self.max_num_tokens}; lower it"
            )
        self._check_combinations()

    def _check_precision(self) -> None:
        choices = WEIGHT_DTYPES[self.backend]
        for name in ("weight_dtype", "draft_weight_dtype"):
            value = getattr(self, name)
            if value is None:
                continue
            if value in DTYPES and self.backend in GPU_BACKENDS:
                raise ConfigError(f"--{name} {value} is what --{name.replace('weight_', '')} is for; use that flag")
            if value not in choices and value in WEIGHT_DTYPES["tensorrt" if value != "w8a8" else "onnxruntime"]:
                raise ConfigError(f"--{name} {value} is not for --backend {self.backend}; use {_list(choices)}")
            require_choice(name, value, choices)

    def check_architectures(self, architectures: tuple[str, ...]) -> None:
        """Refuse a weight format or plugins that one of the GPU architectures has not.

        Raises:
            ConfigError: names the flag, and what the architecture has.
        """
        for architecture in architectures:
            for name in ("weight_dtype", "draft_weight_dtype"):
                if getattr(self, name) == "fp8" and architecture not in FP8_ARCHITECTURES:
                    raise ConfigError(f"--{name} fp8 needs {' or '.join(FP8_ARCHITECTURES)}; {architecture} has int8")
            if self.gpu.uses_plugins(self.backend) and architecture not in GPU_ARCHITECTURES["tensorrt"]:
                raise ConfigError(
                    f"the plugin library is compiled for {', '.join(GPU_ARCHITECTURES['tensorrt'])}, not for "
                    f"{architecture}; use --dspark_plugin disable"
                )

    @property
    def precision(self) -> Precision:
        """What the target computes in and how its linear layers are stored."""
        if self.backend not in GPU_BACKENDS:
            return Precision("float32", self.weight_dtype or "int8")
        dtype: Dtype = self.gpu.dtype or "float16"
        return Precision(dtype, self.weight_dtype or dtype)

    @property
    def draft_precision(self) -> Precision:
        """The same for the drafter: a weight format of the target holds for it unless it has its own type."""
        target = self.precision
        if self.backend not in GPU_BACKENDS:
            return Precision("float32", self.draft_weight_dtype or target.weight_dtype)
        dtype = self.gpu.draft_dtype or target.dtype
        if self.draft_weight_dtype is not None:
            return Precision(dtype, self.draft_weight_dtype)
        quantised = target.weight_dtype != target.dtype and self.gpu.draft_dtype is None
        return Precision(dtype, target.weight_dtype if quantised else dtype)

    def _check_combinations(self) -> None:
        if (self.draft_vocab_size is None) != (self.draft_vocab_counts is None):
            raise ConfigError(
                "--draft_vocab_size and --draft_vocab_counts belong together; give both or neither, "
                "the counts say which tokens to keep"
            )
        if self.draft_checkpoint is None:
            given = {name: getattr(self, name) for name in ("draft_weight_dtype", "max_draft_len", "draft_vocab_size")}
            for name, value in {**given, "draft_dtype": self.gpu.draft_dtype}.items():
                if value is not None:
                    raise ConfigError(f"--{name} needs a drafter; add --draft_checkpoint or leave it out")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; options of GPU builds only where they are used."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "gpu"}
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        return {**plain, **self.gpu.as_json()} if self.backend in GPU_BACKENDS else plain


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


def _list(choices: tuple[str, ...]) -> str:
    return ", ".join(choices)
