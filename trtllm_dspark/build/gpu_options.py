"""What only GPU builds take: precision, the GPU itself, and how its builder works. Names are those of the flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trtllm_dspark.build._choices import (
    ACCEPTANCES,
    DTYPES,
    GPU_ARCHITECTURES,
    GPU_BACKENDS,
    PROFILING_VERBOSITIES,
    SCHEDULES,
    Acceptance,
    Backend,
    Dtype,
    Schedule,
)
from trtllm_dspark.build.gpus import find_gpu
from trtllm_dspark.errors import ConfigError

KV_FRACTION = 0.9
_MAX_WORKERS = 64
_MAX_CANDIDATES = 256
_PLUGIN_ONLY = ("dspark_plugin_library", "acceptance", "schedule", "num_candidates")
# What TensorRT-RTX's builder cannot do without a GPU, or at all: flag -> reason.
_NOT_IN_RTX = {
    **dict.fromkeys(_PLUGIN_ONLY, "TensorRT-RTX takes no plugins"),
    "strip_plan": "its builder needs a GPU to strip a plan",
    "fast_build": "it times no kernels, there is nothing to shorten",
    "input_timing_cache": "it times no kernels, its timing cache is always empty",
    "output_timing_cache": "it times no kernels, its timing cache is always empty",
}


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options of a GPU build; every default means "not given".

    Attributes:
        dtype: what the target computes in and stores, caches included; float16 when None.
        draft_dtype: the same for the drafter; the target's when None.
        opt_num_tokens: tokens of a pass the kernels are tuned for; the largest of each profile when None.
        gpu: name of the GPU the engine is for, which gives architecture and memory.
        gpu_architectures: what to compile for, such as sm89; replaces `gpu`.
        gpu_memory_gib: memory in GiB the engine must fit; replaces that of `gpu`.
        kv_cache_free_gpu_mem_fraction: part of what all else leaves free that caches may take; 0.9 when None.
        dspark_plugin: `enable` compiles attention and the round's algorithms as plugins, `disable` as native layers;
            `disable` when None, which is what this version runs.
        dspark_plugin_library: the plugin library, built with `trtllm-dspark build_plugins`.
        acceptance: how a plugin engine accepts drafts; `rejection` when None.
        schedule: how a plugin engine chooses verify lengths; `threshold` when None.
        num_candidates: restricts a plugin engine's drafts to so many largest base logits; all when None.
        strip_plan: leave weights out of the plans; the graphs stay in the directory for refitting.
        weight_streaming: plans whose weights may stay in host memory.
        fast_build: compile quicker, to slower kernels.
        workers: plans compiled at once; 1 when None.
        input_timing_cache: kernel timings of an earlier build.
        output_timing_cache: file to write this build's kernel timings to.
        profiling_verbosity: what plans tell of their layers; only `detailed` can be checked.
    """

    dtype: Dtype | None = None
    draft_dtype: Dtype | None = None
    opt_num_tokens: int | None = None
    gpu: str | None = None
    gpu_architectures: tuple[str, ...] = ()
    gpu_memory_gib: float | None = None
    kv_cache_free_gpu_mem_fraction: float | None = None
    dspark_plugin: str | None = None
    dspark_plugin_library: Path | None = None
    acceptance: Acceptance | None = None
    schedule: Schedule | None = None
    num_candidates: int | None = None
    strip_plan: bool = False
    weight_streaming: bool = False
    fast_build: bool = False
    workers: int | None = None
    input_timing_cache: Path | None = None
    output_timing_cache: Path | None = None
    profiling_verbosity: str | None = None

    @property
    def kv_fraction(self) -> float:
        """Part of the free memory that caches may take."""
        return KV_FRACTION if self.kv_cache_free_gpu_mem_fraction is None else self.kv_cache_free_gpu_mem_fraction

    @property
    def named_architectures(self) -> tuple[str, ...]:
        """Architectures that the flags name, one way or the other.

        Raises:
            ConfigError: `gpu` is not known.
        """
        return self.gpu_architectures if self.gpu is None else (find_gpu(self.gpu).architecture,)

    def given(self) -> tuple[str, ...]:
        """Return the flags that are set."""
        return tuple(flag_name(f.name) for f in fields(self) if getattr(self, f.name) != f.default)

    def as_json(self) -> dict[str, Any]:
        """Return the options as plain JSON values."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    def check(self, backend: Backend) -> None:
        """Refuse values out of range and options the backend has not.

        Raises:
            ConfigError: names the flag, and what to do instead.
        """
        given = self.given()
        if backend not in GPU_BACKENDS:
            if given:
                raise ConfigError(
                    f"--{given[0]} is for GPU engines; add --backend {' or '.join(GPU_BACKENDS)}, or leave it out"
                )
            return
        if backend == "tensorrt_rtx":
            self._check_rtx(given)
        self._check_values(backend)
        self._check_plugin(backend)

    def _check_rtx(self, given: tuple[str, ...]) -> None:
        for name in given:
            if name in _NOT_IN_RTX:
                raise ConfigError(
                    f"--{name} is not for tensorrt_rtx: {_NOT_IN_RTX[name]}; leave it out or use --backend tensorrt"
                )
        if self.dspark_plugin == "enable":
            raise ConfigError("--dspark_plugin enable needs --backend tensorrt: TensorRT-RTX takes no plugins")
        if self.gpu is None and not self.gpu_architectures:
            raise ConfigError(
                "--backend tensorrt_rtx needs --gpu NAME, or --gpu_architecture with some of "
                f"{', '.join(GPU_ARCHITECTURES['tensorrt_rtx'])}"
            )

    def _check_values(self, backend: Backend) -> None:
        for name, value in (("dtype", self.dtype), ("draft_dtype", self.draft_dtype)):
            if value is not None:
                require_choice(name, value, DTYPES)
        if self.gpu is not None and self.gpu_architectures:
            raise ConfigError("--gpu gives the architecture; leave out --gpu_architecture, or --gpu")
        names = self.named_architectures
        for architecture in names:
            if architecture not in GPU_ARCHITECTURES[backend]:
                raise ConfigError(
                    f"--backend {backend} has no {architecture}, only {', '.join(GPU_ARCHITECTURES[backend])}; "
                    "choose one of them or the other GPU backend"
                )
        if len(set(names)) != len(names):
            raise ConfigError("--gpu_architecture names one twice; name each once")
        if backend == "tensorrt" and len(names) > 1:
            raise ConfigError("TensorRT compiles for the GPU it runs on; name one --gpu_architecture")
        if self.gpu_memory_gib is not None and not 0 < self.gpu_memory_gib < 2**20:
            raise ConfigError(f"--gpu_memory_gib must be above 0, got {self.gpu_memory_gib!r}")
        if not 0 < self.kv_fraction <= 1:
            raise ConfigError(
                f"--kv_cache_free_gpu_mem_fraction must be above 0 and at most 1, got {self.kv_fraction!r}"
            )
        known = self.gpu is not None or self.gpu_memory_gib is not None or not self.gpu_architectures
        if self.kv_cache_free_gpu_mem_fraction is not None and not known:
            raise ConfigError("--kv_cache_free_gpu_mem_fraction is of a GPU's memory; add --gpu or --gpu_memory_gib")
        if self.workers is not None:
            require_int("workers", self.workers, 1, _MAX_WORKERS)
        if self.opt_num_tokens is not None:
            require_int("opt_num_tokens", self.opt_num_tokens, 1, 2**20)
        if self.profiling_verbosity is not None:
            require_choice("profiling_verbosity", self.profiling_verbosity, PROFILING_VERBOSITIES)
            if self.profiling_verbosity != "detailed":
                raise ConfigError(
                    f"--profiling_verbosity {self.profiling_verbosity} hides the layers that every build checks; "
                    "use detailed or leave it out"
                )
        if self.input_timing_cache is not None and not self.input_timing_cache.is_file():
            raise ConfigError(f"--input_timing_cache {self.input_timing_cache} is no file; leave it out at first")

    def _check_plugin(self, backend: Backend) -> None:
        for name, choices in (
            ("dspark_plugin", ("enable", "disable")),
            ("acceptance", ACCEPTANCES),
            ("schedule", SCHEDULES),
        ):
            if getattr(self, name) is not None:
                require_choice(name, getattr(self, name), choices)
        if self.num_candidates is not None:
            require_int("num_candidates", self.num_candidates, 1, _MAX_CANDIDATES)
        if backend != "tensorrt":
            return
        if self.uses_plugins(backend) and self.dspark_plugin_library is None:
            raise ConfigError(
                "--dspark_plugin enable needs --dspark_plugin_library FILE; make it with: trtllm-dspark build_plugins "
                "--output_dir DIR, or use --dspark_plugin disable"
            )
        if self.uses_plugins(backend):
            return
        for name in _PLUGIN_ONLY:
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name} is for plugin engines; add --dspark_plugin enable, or leave it out")

    def uses_plugins(self, backend: Backend) -> bool:
        """Whether the graphs hold plugin nodes: TensorRT's do where they are enabled."""
        return backend == "tensorrt" and self.dspark_plugin == "enable"


def flag_name(field_name: str) -> str:
    """Return the flag of an option."""
    return "gpu_architecture" if field_name == "gpu_architectures" else field_name


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value outside a closed set.

    Raises:
        ConfigError: names the flag and the set.
    """
    if value not in choices:
        raise ConfigError(f"--{name} must be one of {', '.join(choices)}, got {value!r}")


def require_int(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is not an integer of low..high.

    Raises:
        ConfigError: names the flag and the range.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"--{name} must be an integer from {low} to {high}, got {value!r}")
