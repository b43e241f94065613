"""Engines: target and drafter passes over a slot cache, one interface for every backend."""

from __future__ import annotations

from pathlib import Path

from trtllm_dspark.engine._heads import load_heads
from trtllm_dspark.engine.base import (
    BlockOutput,
    ContextBatch,
    Engine,
    EngineLimits,
    TargetOutput,
    TokenBatch,
)
from trtllm_dspark.engine.onnxruntime import OnnxRuntimeEngine
from trtllm_dspark.engine.tensorrt import TensorRtEngine
from trtllm_dspark.engine.tensorrt.load import BACKENDS, load_tensorrt
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.errors import ConfigError, EngineError
from trtllm_dspark.graph import HEADS_FILE

__all__ = [
    "BlockOutput",
    "ContextBatch",
    "Engine",
    "EngineLimits",
    "OnnxRuntimeEngine",
    "TargetOutput",
    "TensorRtEngine",
    "TokenBatch",
    "load_engine",
]


def load_engine(
    path: str | Path,
    *,
    num_threads: int = 2,
    verify_hashes: bool = True,
    kernel_library: str | Path | None = None,
) -> Engine:
    """Open an engine directory and load its engine.

    Args:
        path: the `--output_dir` of a build.
        num_threads: CPU threads of a pass.
        verify_hashes: hash every file before it is used; False checks existence and size only.
        kernel_library: `libtrtllm_dspark_kernels.so` for TensorRT engines: whole rounds then stay on the GPU. Plans
            with plugins need `libtrtllm_dspark_plugins.so`.

    Raises:
        ConfigError: `num_threads` is below 1, or a kernel library is given to an engine that has no use for it.
        DeviceError: a TensorRT engine finds no GPU, or a package it needs is not installed.
        EngineError: no engine directory, a damaged one, or one of a backend this version cannot run.
    """
    if num_threads < 1:
        raise ConfigError(f"num_threads is {num_threads}, it must be at least 1")
    directory = open_engine_dir(path, verify_hashes=verify_hashes)
    manifest = directory.manifest
    if manifest.backend not in (*BACKENDS, "onnxruntime"):
        raise EngineError(f"{directory.path} was built for backend {manifest.backend!r}, which this version cannot run")
    target, drafter = manifest.target_config, manifest.drafter_config
    limits = EngineLimits(
        max_batch_size=manifest.limits.max_batch_size,
        max_seq_len=manifest.limits.max_seq_len,
        max_num_tokens=manifest.limits.max_num_tokens,
        max_draft_len=manifest.limits.max_draft_len,
        vocab_size=target.vocab_size,
        draft_vocab_size=drafter.draft_vocab_size if drafter else 0,
        feature_size=drafter.feature_size if drafter else 0,
        mask_token_id=drafter.mask_token_id if drafter else 0,
        has_drafter=drafter is not None,
        autoregressive=drafter is not None and drafter.autoregressive,
    )
    if manifest.backend in BACKENDS:
        library = None if kernel_library is None else Path(kernel_library)
        return load_tensorrt(directory, limits, kernel_library=library)
    if kernel_library is not None:
        raise ConfigError(f"{directory.path} runs on a CPU, which has no use for a kernel library; leave it out")
    heads = load_heads(directory.file(HEADS_FILE), drafter, target.vocab_size) if drafter else None
    return OnnxRuntimeEngine(directory.path, target, drafter, limits, heads, num_threads=num_threads)
