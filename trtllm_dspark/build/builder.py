"""Carry out a build: emit the graphs, store the weights, check the result, publish the directory."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from trtllm_dspark import __version__
from trtllm_dspark.build._choices import DTYPES
from trtllm_dspark.build.config import BuildConfig
from trtllm_dspark.build.plan import BuildPlan, plan_build
from trtllm_dspark.build.report import BuildReport, Progress, StepClock
from trtllm_dspark.build.tensorrt_rtx import cache_len, compile_plan, engine_profiles, import_tensorrt_rtx
from trtllm_dspark.build.verify import verify_engine
from trtllm_dspark.checkpoint import CheckpointFile, TokenizerAssets
from trtllm_dspark.engine_dir import (
    FileEntry,
    Manifest,
    ModelEntry,
    describe_file,
    open_engine_dir,
    stage_directory,
)
from trtllm_dspark.engine_dir.manifest import MANIFEST_NAME
from trtllm_dspark.engine_dir.staging import check_destination
from trtllm_dspark.errors import DeviceError
from trtllm_dspark.graph import (
    BLOCK_GRAPH,
    CONTEXT_GRAPH,
    TARGET_GRAPH,
    DrafterSource,
    WrittenTarget,
    write_drafter,
    write_heads,
    write_target,
)
from trtllm_dspark.graph.lowering import ORT, Lowering, TrtNativeLowering

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG_FILE = "generation_config.json"
# Fused query-key-value, output, gate-up and down: what a decoder layer stores.
_MATRICES_PER_LAYER = 4
_PROGRESS_STEPS = 10


def build_engine(config: BuildConfig, progress: Progress | None = None) -> BuildReport:
    """Build an engine directory; it appears whole or not at all.

    Args:
        config: what to build.
        progress: called with each step's name and the finished fraction of the build.

    Returns:
        Sizes and times.

    Raises:
        UsageError: the output directory may not be written, or a limit does not fit the models.
        CheckpointError: a checkpoint cannot be read, or target and drafter do not fit each other.
        EngineError: the result does not compute what the checkpoint says; nothing is left behind.
        DeviceError: the disk is full or fails, or the backend's builder is not installed.
    """
    check_destination(config.output_dir, overwrite=config.overwrite)
    plan = plan_build(config)
    if config.backend == "tensorrt_rtx":
        # Before minutes of work: a missing builder is refused here.
        import_tensorrt_rtx()
    _warn_of_memory(plan)
    clock = StepClock(_shares(plan), progress)
    with stage_directory(config.output_dir, overwrite=config.overwrite) as staged:
        _check_disk(plan, staged.path)
        if plan.config.backend == "tensorrt_rtx":
            _compile_plans(plan, staged.path, clock)
        else:
            target = _write_target(plan, staged.path, clock)
            _write_drafter(plan, staged.path, target, clock)
            _write_heads(plan, staged.path)
        with clock.step("manifest"):
            if plan.target.tokenizer is not None:
                _write_tokenizer(plan.target.tokenizer, staged.path)
            manifest = _manifest(plan, staged.path)
            (staged.path / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        with clock.step("verify"):
            if plan.config.backend == "onnxruntime":
                errors = verify_engine(staged.path, plan)
            else:
                # No GPU to run it on: what can be checked is that every file arrived whole.
                errors = None
                open_engine_dir(staged.path)
        with clock.step("publish"):
            staged.publish()
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


def _warn_of_memory(plan: BuildPlan) -> None:
    if plan.device_memory is not None:
        memory = plan.device_memory
        logger.info(
            "device memory: weights %.2f GB, caches %.2f GB, activations %.2f GB, together %.2f GB (estimate)",
            (memory.target_weight_bytes + memory.drafter_weight_bytes) / 1e9,
            memory.kv_bytes / 1e9,
            memory.activation_bytes / 1e9,
            memory.total_bytes / 1e9,
        )
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
        plans = 1 + len(plan.config.gpu_architectures)
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
    if plan.config.backend == "tensorrt_rtx":
        for architecture in plan.config.gpu_architectures:
            shares[f"compile target {architecture}"] = 4 * shares["target"]
            if plan.drafter is not None:
                shares[f"compile drafter_context {architecture}"] = 2 * shares["drafter"]
                shares[f"compile drafter_block {architecture}"] = 2 * shares["drafter"]
    # The reference reads every weight once more.
    return {
        **shares,
        "manifest": 0.1 * shares["target"],
        "verify": shares["target"],
        "publish": 0.05 * shares["target"],
    }


def _compile_plans(plan: BuildPlan, directory: Path, clock: StepClock) -> None:
    """Emit the graphs beside the plans, compile each, and remove the graphs: a plan holds its own weights."""
    block = 0 if plan.drafter_config is None else plan.drafter_config.block_size
    dtype: Literal["float16", "bfloat16"] = "float16" if plan.config.weight_dtype == "float16" else "bfloat16"
    lowering = TrtNativeLowering(cache_len(plan.limits, block), dtype)
    graphs = directory / "graphs"
    graphs.mkdir()
    target = _write_target(plan, graphs, clock, lowering)
    _write_drafter(plan, graphs, target, clock, lowering)
    _write_heads(plan, directory)
    profiles = engine_profiles(plan.limits)
    # A block's only free extent is the number of requests.
    jobs = {TARGET_GRAPH: profiles, CONTEXT_GRAPH: profiles, BLOCK_GRAPH: profiles[:1]}
    for name, wanted in jobs.items():
        stem = Path(name).stem
        for architecture in plan.config.gpu_architectures if (graphs / name).is_file() else ():
            with clock.step(f"compile {stem} {architecture}", _PROGRESS_STEPS) as advance:
                destination = directory / f"{stem}.{architecture}.plan"
                compile_plan(graphs / name, destination, wanted, architecture, _Fractions(advance))
    shutil.rmtree(graphs)


class _Fractions:
    """Turns growing fractions into single steps of a clock."""

    def __init__(self, advance: Callable[[str], None]) -> None:
        self._advance = advance
        self._told = 0

    def __call__(self, fraction: float) -> None:
        while self._told < int(fraction * _PROGRESS_STEPS):
            self._told += 1
            self._advance("compile")


def _write_target(plan: BuildPlan, directory: Path, clock: StepClock, lowering: Lowering = ORT) -> WrittenTarget:
    model = plan.target.config
    layers = () if plan.drafter_config is None else plan.drafter_config.target_layer_ids
    with clock.step("target", _MATRICES_PER_LAYER * model.num_layers + 1) as advance:
        return write_target(
            directory,
            model,
            plan.target.arrays,
            max_seq_len=plan.limits.max_seq_len,
            feature_layer_ids=layers,
            weight_dtype=plan.config.weight_dtype,
            lowering=lowering,
            progress=advance,
        )


def _write_drafter(
    plan: BuildPlan, directory: Path, target: WrittenTarget, clock: StepClock, lowering: Lowering = ORT
) -> None:
    if plan.drafter is None or plan.drafter_config is None:
        return
    config, arrays = plan.drafter_config, plan.drafter.arrays
    source = DrafterSource(config, arrays, plan.target.config, plan.target.arrays, target)
    with clock.step("drafter", (_MATRICES_PER_LAYER + 1) * config.backbone.num_layers + 1) as advance:
        write_drafter(
            directory,
            source,
            max_seq_len=plan.limits.max_seq_len,
            max_draft_len=plan.limits.max_draft_len,
            draft_token_ids=plan.draft_vocab,
            weight_dtype=plan.draft_weight_dtype,
            lowering=lowering,
            progress=advance,
        )


def _write_heads(plan: BuildPlan, directory: Path) -> None:
    if plan.drafter is None or plan.drafter_config is None:
        return
    write_heads(
        directory,
        plan.drafter_config,
        plan.drafter.arrays,
        vocab_size=plan.target.config.vocab_size,
        draft_token_ids=plan.draft_vocab,
        # The core runs the heads; it takes 8-bit or float32 factors.
        weight_dtype="float32" if plan.draft_weight_dtype in DTYPES else plan.draft_weight_dtype,
    )


def _write_tokenizer(assets: TokenizerAssets, directory: Path) -> None:
    (directory / TOKENIZER_FILE).write_text(assets.tokenizer_json, encoding="utf-8")
    if assets.chat_template is not None:
        (directory / CHAT_TEMPLATE_FILE).write_text(assets.chat_template, encoding="utf-8")
    text = json.dumps(assets.generation_config, indent=2) + "\n"
    (directory / GENERATION_CONFIG_FILE).write_text(text, encoding="utf-8")


def _manifest(plan: BuildPlan, directory: Path) -> Manifest:
    drafter = None
    if plan.drafter is not None:
        drafter = ModelEntry(plan.draft_weight_dtype, _checkpoint_files(plan.drafter.files))
    return Manifest(
        backend=plan.config.backend,
        limits=plan.limits,
        target=ModelEntry(plan.config.weight_dtype, _checkpoint_files(plan.target.files)),
        target_config=plan.target.config,
        drafter=drafter,
        drafter_config=plan.drafter_config,
        files=tuple(describe_file(path, directory) for path in sorted(directory.rglob("*")) if path.is_file()),
        tools=_tools(plan.config.backend),
        gpu_architectures=plan.config.gpu_architectures,
    )


def _checkpoint_files(files: tuple[CheckpointFile, ...]) -> tuple[FileEntry, ...]:
    return tuple(FileEntry(file.name, file.size, file.sha256) for file in files)


def _tools(backend: str) -> dict[str, str]:
    names = ["onnx", "onnxruntime", "numpy"]
    if backend == "tensorrt_rtx":
        names.append("tensorrt_rtx_cu13")
    libraries = {name: version(name) for name in names}
    return {"trtllm-dspark": __version__, **libraries, "python": platform.python_version()}
