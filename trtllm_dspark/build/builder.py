"""Carry out a build: emit the graphs, store the weights, check the result, publish the directory."""

from __future__ import annotations

import logging
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from trtllm_dspark import __version__
from trtllm_dspark.build._choices import GPU_BACKENDS
from trtllm_dspark.build.backends import TOOLKITS
from trtllm_dspark.build.config import BuildConfig
from trtllm_dspark.build.emit import emit_drafter, emit_heads, emit_target, emit_tokenizer
from trtllm_dspark.build.gpu_plans import check_builder, compile_plans, plan_jobs
from trtllm_dspark.build.plan import BuildPlan, plan_build
from trtllm_dspark.build.report import BuildReport, Progress, StepClock
from trtllm_dspark.build.verify import verify_engine
from trtllm_dspark.checkpoint import CheckpointFile, share_equal_tensors
from trtllm_dspark.engine_dir import (
    FileEntry,
    GpuBuild,
    Manifest,
    ModelEntry,
    describe_file,
    open_engine_dir,
    stage_directory,
)
from trtllm_dspark.engine_dir.manifest import MANIFEST_NAME
from trtllm_dspark.engine_dir.staging import check_destination
from trtllm_dspark.errors import DeviceError, UsageError

logger = logging.getLogger(__name__)


def build_engine(
    config: BuildConfig, progress: Progress | None = None, announce: Callable[[BuildPlan], None] | None = None
) -> BuildReport:
    """Build an engine directory; it appears whole or not at all.

    Args:
        config: what to build.
        progress: called with each step's name and the finished fraction of the build.
        announce: called with the plan before anything is written.

    Returns:
        Sizes and times.

    Raises:
        UsageError: the output directory may not be written, or a limit does not fit the models.
        CheckpointError: a checkpoint cannot be read, or target and drafter do not fit each other.
        EngineError: the result does not compute what the checkpoint says; nothing is left behind.
        DeviceError: the disk is full or fails, or the backend's builder is not installed.
    """
    if config.weights_optional:
        raise UsageError("a build from configurations alone has no weights to store; add --dry_run")
    check_destination(config.output_dir, overwrite=config.overwrite)
    plan = plan_build(config)
    contract = check_builder(plan) if config.backend in GPU_BACKENDS else None
    if announce is not None:
        announce(plan)
    _warn(plan)
    if plan.drafter is not None:
        # Released drafters ship frozen copies of their target's tables; an engine needs them once.
        plan = replace(plan, drafter=share_equal_tensors(plan.drafter, plan.target))
    clock = StepClock(_shares(plan), progress)
    with stage_directory(config.output_dir, overwrite=config.overwrite) as staged:
        _check_disk(plan, staged.path)
        gpu = None
        if config.backend in GPU_BACKENDS:
            gpu = compile_plans(plan, staged.path, clock, contract)
        else:
            target = emit_target(plan, staged.path, clock)
            emit_drafter(plan, staged.path, target, clock)
            emit_heads(plan, staged.path)
        with clock.step("manifest"):
            if plan.target.tokenizer is not None:
                emit_tokenizer(plan.target.tokenizer, staged.path)
            manifest = _manifest(plan, staged.path, gpu)
            (staged.path / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        with clock.step("verify"):
            if plan.config.backend == "onnxruntime":
                errors = verify_engine(staged.path, plan)
            else:
                # Plans are not run here: what can be checked is that every file arrived whole.
                errors = None
                open_engine_dir(staged.path)
        with clock.step("publish"):
            staged.publish()
            # Known builders report success and leave nothing: what a user finds is looked at once more.
            open_engine_dir(config.output_dir, verify_hashes=False)
    return BuildReport(
        output_dir=config.output_dir,
        manifest=manifest,
        seconds=clock.seconds,
        errors=errors,
        peak_memory_bytes=_peak_memory(),
        kv_cache_bytes=_kv_bytes(plan),
    )


def _peak_memory() -> int:
    """Return the largest resident size of this process in bytes (ru_maxrss would begin with the parent's)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise DeviceError("/proc/self/status has no VmHWM line; builds need Linux with /proc mounted")


def _kv_bytes(plan: BuildPlan) -> int:
    if plan.device_memory is not None:
        return plan.device_memory.kv_bytes
    return plan.estimate.target_kv_bytes + plan.estimate.drafter_kv_bytes


def _warn(plan: BuildPlan) -> None:
    if plan.target.tokenizer is None:
        logger.warning(
            "the target has no tokenizer.json: run, bench and serve will refuse this engine, it takes token ids from "
            "Python only; put the model's tokenizer.json beside its weights and build again"
        )
    gpu = plan.config.gpu
    kinds = [("stripped plans", gpu.strip_plan), ("plans with weight streaming", gpu.weight_streaming)]
    if any(asked for _, asked in kinds):
        names = " and ".join(name for name, asked in kinds if asked)
        logger.warning("this version builds and inspects %s, it does not run them", names)
    if plan.device_memory is not None:
        return
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if plan.estimate.memory_bytes > total:
        logger.warning(
            "weights and full caches take %.1f GB, this machine has %.1f GB; lower --max_batch_size or --max_seq_len",
            plan.estimate.memory_bytes / 1e9,
            total / 1e9,
        )


def _check_disk(plan: BuildPlan, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    needed = plan.estimate.disk_bytes
    if plan.device_memory is not None:
        # The graphs lie beside the plans until all are compiled.
        plans = 1 + len(plan.gpu_architectures)
        needed = plans * (plan.device_memory.target_weight_bytes + plan.device_memory.drafter_weight_bytes)
    if free < needed:
        raise DeviceError(
            f"the engine needs {needed / 1e6:.0f} MB and the disk of {directory.parent} has "
            f"{free / 1e6:.0f} MB left; free space or choose another --output_dir"
        )


def _shares(plan: BuildPlan) -> dict[str, float]:
    shares = {"target": float(plan.estimate.target_weight_bytes)}
    if plan.drafter is not None:
        shares["drafter"] = float(plan.estimate.drafter_weight_bytes)
    if plan.config.backend in GPU_BACKENDS:
        for job in plan_jobs(plan):
            shares[job.step] = 4 * shares["target"] if job.stem == "target" else 2 * shares["drafter"]
    # The reference reads every weight once more.
    return {
        **shares,
        "manifest": 0.1 * shares["target"],
        "verify": shares["target"],
        "publish": 0.05 * shares["target"],
    }


def _manifest(plan: BuildPlan, directory: Path, gpu: GpuBuild | None) -> Manifest:
    config, drafter = plan.config, None
    if plan.drafter is not None:
        dtype = None if gpu is None else config.draft_precision.dtype
        drafter = ModelEntry(plan.draft_weight_dtype, _checkpoint_files(plan.drafter.files), dtype)
    dtype = None if gpu is None else config.precision.dtype
    return Manifest(
        backend=config.backend,
        limits=plan.limits,
        target=ModelEntry(plan.weight_dtype, _checkpoint_files(plan.target.files), dtype),
        target_config=plan.target.config,
        drafter=drafter,
        drafter_config=plan.drafter_config,
        files=tuple(describe_file(path, directory) for path in sorted(directory.rglob("*")) if path.is_file()),
        tools=_tools(config.backend),
        gpu_architectures=plan.gpu_architectures,
        gpu=gpu,
    )


def _checkpoint_files(files: tuple[CheckpointFile, ...]) -> tuple[FileEntry, ...]:
    return tuple(FileEntry(file.name, file.size, file.sha256) for file in files)


def _tools(backend: str) -> dict[str, str]:
    names = ["onnx", "onnxruntime", "numpy"]
    libraries = {name: version(name) for name in names}
    if backend in GPU_BACKENDS:
        toolkit = TOOLKITS[backend]
        libraries[toolkit.distribution] = str(toolkit.load().__version__)
    return {"trtllm-dspark": __version__, **libraries, "python": platform.python_version()}
