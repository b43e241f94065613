"""Compile the graphs of an engine into plans, several at once if asked to."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from trtllm_dspark.build.backends import TOOLKITS
from trtllm_dspark.build.emit import emit_drafter, emit_heads, emit_round, emit_target
from trtllm_dspark.build.plan import BuildPlan
from trtllm_dspark.build.plan_report import plan_report
from trtllm_dspark.build.report import StepClock
from trtllm_dspark.build.tensorrt import CompiledPlan, CompilerJob, CompilerOptions, Profile, cache_len, engine_profiles
from trtllm_dspark.build.tensorrt.compiler import merge_timing_caches
from trtllm_dspark.build.tensorrt.device import find_device
from trtllm_dspark.build.tensorrt.memory import KV_SPLIT
from trtllm_dspark.engine_dir import GpuBuild, write_plan_report
from trtllm_dspark.errors import ConfigError, DeviceError
from trtllm_dspark.graph import BLOCK_GRAPH, CONTEXT_GRAPH, TARGET_GRAPH
from trtllm_dspark.graph.lowering import TrtNativeLowering, TrtPluginLowering
from trtllm_dspark.graph.round_graphs import DRAFTER_GRAPH
from trtllm_dspark.graph.round_options import RoundOptions
from trtllm_dspark.plugins import check_plugin_library

PROGRESS_STEPS = 10
GRAPH_FOLDER = "graphs"


@dataclass(frozen=True, slots=True)
class _Job:
    """One plan to compile."""

    stem: str
    architecture: str
    profiles: tuple[Profile, ...]

    @property
    def step(self) -> str:
        return f"compile {self.stem} {self.architecture}"


def plan_jobs(plan: BuildPlan) -> tuple[_Job, ...]:
    """Return what is compiled: every graph for every architecture."""
    profiles = engine_profiles(plan.limits, plan.config.gpu.opt_num_tokens)
    graphs = {TARGET_GRAPH: profiles}
    # A block's only free extent is the number of requests.
    if plan.drafter is not None and plan.uses_plugins:
        graphs[DRAFTER_GRAPH] = profiles[:1]
    elif plan.drafter is not None:
        graphs |= {CONTEXT_GRAPH: profiles, BLOCK_GRAPH: profiles[:1]}
    return tuple(
        _Job(Path(name).stem, architecture, wanted)
        for name, wanted in graphs.items()
        for architecture in plan.gpu_architectures
    )


def check_builder(plan: BuildPlan) -> str | None:
    """Check what a build needs before minutes of work: the builder, its GPU, the plugin library.

    Returns:
        The plugin library's contract hash; None where graphs hold no plugins.

    Raises:
        DeviceError: the builder is missing, or there is no GPU and it needs one.
        ConfigError: the GPU is of another architecture than asked for.
        EngineError: the plugin library is of another contract.
    """
    toolkit = TOOLKITS[plan.config.backend]
    if toolkit.needs_gpu:
        found, (wanted,) = find_device(), plan.gpu_architectures
        if found.architecture != wanted:
            raise ConfigError(
                f"TensorRT compiles for the GPU it runs on, here {found.name} ({found.architecture}), not {wanted}; "
                "leave out --gpu and --gpu_architecture, or build on the other machine"
            )
    library = plan.config.gpu.dspark_plugin_library
    contract = None if library is None else check_plugin_library(library, "--dspark_plugin_library")
    toolkit.load()
    return contract


def compile_plans(plan: BuildPlan, directory: Path, clock: StepClock, plugin_contract: str | None) -> GpuBuild:
    """Write the graphs, compile each into `directory`, and remove the graphs: a plan holds its own weights.

    Stripped plans hold none; their graphs stay, to refit from.
    """
    options = plan.config.gpu
    graphs = directory / GRAPH_FOLDER
    graphs.mkdir()
    emitted = (
        _emit_plugin_graphs(plan, graphs, clock) if plan.uses_plugins else _emit_native_graphs(plan, graphs, clock)
    )
    if not plan.uses_plugins:
        emit_heads(plan, directory)
    cache = _read_timing_cache(plan)
    settings = CompilerOptions(
        plugin_library=options.dspark_plugin_library,
        strip_plan=options.strip_plan,
        weight_streaming=options.weight_streaming,
        fast_build=options.fast_build,
        timing_cache=cache,
    )

    toolkit = TOOLKITS[plan.config.backend]
    jobs = [
        CompilerJob(
            toolkit,
            graphs / f"{job.stem}.onnx",
            directory / f"{job.stem}.{job.architecture}.plan",
            job.profiles,
            job.architecture,
            settings,
        )
        for job in plan_jobs(plan)
    ]
    compiled = _run(jobs, [job.step for job in plan_jobs(plan)], clock, options.workers or 1)
    for job, done in zip(jobs, compiled, strict=True):
        model = onnx.load(job.graph, load_external_data=False)
        write_plan_report(directory, plan_report(done, model, job.architecture, job.profiles))
    if options.output_timing_cache is not None:
        caches = [each.timing_cache for each in compiled if each.timing_cache is not None]
        _write_timing_cache(options.output_timing_cache, merge_timing_caches(toolkit, caches))
    if not options.strip_plan:
        shutil.rmtree(graphs)
    return replace(
        emitted,
        plugin_contract=plugin_contract,
        strip_plan=options.strip_plan,
        weight_streaming=options.weight_streaming,
    )


def _emit_native_graphs(plan: BuildPlan, graphs: Path, clock: StepClock) -> GpuBuild:
    block = 0 if plan.drafter_config is None else plan.drafter_config.block_size
    length = cache_len(plan.limits, block)
    target = emit_target(plan, graphs, clock, TrtNativeLowering(length, plan.config.precision.dtype))
    emit_drafter(plan, graphs, target, clock, TrtNativeLowering(length, plan.config.draft_precision.dtype))
    return GpuBuild(TrtNativeLowering.name, length)


def _emit_plugin_graphs(plan: BuildPlan, graphs: Path, clock: StepClock) -> GpuBuild:
    block = 0 if plan.drafter_config is None else plan.drafter_config.block_size
    length, slots = cache_len(plan.limits, block, plugins=True), plan.limits.max_batch_size
    lowering = TrtPluginLowering(length, slots, plan.config.precision.dtype, KV_SPLIT)
    draft_lowering = TrtPluginLowering(length, slots, plan.config.draft_precision.dtype, KV_SPLIT)
    stored = plan.config.draft_precision
    # Heads follow the drafter: narrow weights, narrow Markov factors.
    given = plan.config.gpu
    options = RoundOptions(
        acceptance=given.acceptance or "rejection",
        schedule=given.schedule or "threshold",
        num_candidates=given.num_candidates or 0,
        int8_heads=stored.weight_dtype != stored.dtype,
    )
    emit_round(plan, graphs, clock, lowering, draft_lowering, options)
    return GpuBuild(
        lowering.name,
        length,
        acceptance=options.acceptance,
        schedule=options.schedule,
        num_candidates=options.num_candidates,
    )


def _run(jobs: Sequence[CompilerJob], steps: Sequence[str], clock: StepClock, workers: int) -> list[CompiledPlan]:
    """Run the jobs, `workers` at a time; the first failure stops those that have not begun.

    Raises:
        DeviceError: a process died.
    """
    if workers == 1:
        compiled = []
        for job, step in zip(jobs, steps, strict=True):
            with clock.step(step, PROGRESS_STEPS) as advance:
                compiled.append(job.run(_Fractions(advance)))
        return compiled
    # Processes: builders of one process share state (two architectures at once fail in it). Spawned, since a driver
    # that was used does not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn) as processes, ThreadPoolExecutor(workers) as threads:

        def run(job: CompilerJob, step: str) -> CompiledPlan:
            with clock.step(step):
                return processes.submit(job.run).result()

        futures = [threads.submit(run, job, step) for job, step in zip(jobs, steps, strict=True)]
        try:
            return [future.result() for future in futures]
        except BaseException as error:
            threads.shutdown(wait=False, cancel_futures=True)
            processes.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, BrokenExecutor):
                raise DeviceError(
                    "a compiler process was killed, probably because memory ran out; lower --workers"
                ) from error
            raise


def _read_timing_cache(plan: BuildPlan) -> bytes | None:
    """Return the timings to start from: none at all where they are neither read nor written."""
    options = plan.config.gpu
    if options.input_timing_cache is not None:
        return options.input_timing_cache.read_bytes()
    return None if options.output_timing_cache is None else b""


def _write_timing_cache(path: Path, cache: bytes) -> None:
    try:
        path.write_bytes(cache)
    except OSError as error:
        raise DeviceError(
            f"--output_timing_cache {path} cannot be written ({error.strerror}); choose another"
        ) from error


class _Fractions:
    """Turns growing fractions into single steps of a clock."""

    def __init__(self, advance: Callable[[str], None]) -> None:
        self._advance = advance
        self._told = 0

    def __call__(self, fraction: float) -> None:
        while self._told < int(fraction * PROGRESS_STEPS):
            self._told += 1
            self._advance("compile")
