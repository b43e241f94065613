"""Flags of `build` for GPU engines; without one given, nothing of them reaches the build."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_dspark.build._choices import ACCEPTANCES, DTYPES, GPU_ARCHITECTURES, PROFILING_VERBOSITIES, SCHEDULES
from trtllm_dspark.build.gpu_options import KV_FRACTION, GpuOptions


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; names are `trtllm-build`'s wherever the meaning is the same."""
    _add_precision(parser.add_argument_group("GPU engines (--backend tensorrt or tensorrt_rtx)"))
    builder = parser.add_argument_group("their builder")
    builder.add_argument(
        "--dspark_plugin",
        choices=("enable", "disable"),
        help="attention and the round's algorithms as plugins (tensorrt only) or native layers (when left out)",
    )
    builder.add_argument(
        "--dspark_plugin_library", type=Path, metavar="FILE", help="plugin library, made by trtllm-dspark build_plugins"
    )
    builder.add_argument("--acceptance", choices=ACCEPTANCES, help="how plugins accept drafts; rejection when left out")
    builder.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help="how plugins choose verify lengths; threshold when left out, which also serves adaptive and fixed",
    )
    builder.add_argument(
        "--num_candidates",
        type=int,
        metavar="N",
        help="restrict the plugins' drafts to the N largest base logits; all when left out",
    )
    builder.add_argument(
        "--opt_num_tokens",
        type=int,
        metavar="N",
        help="tokens of a pass that kernels are tuned for; the largest when left out",
    )
    builder.add_argument(
        "--strip_plan", action="store_true", help="plans without weights; their graphs stay, to refit from"
    )
    builder.add_argument("--weight_streaming", action="store_true", help="plans whose weights may stay in host memory")
    builder.add_argument("--fast_build", action="store_true", help="compile quicker, to slower kernels")
    builder.add_argument("--workers", type=int, metavar="N", help="plans compiled at once; 1 when left out")
    builder.add_argument("--input_timing_cache", type=Path, metavar="FILE", help="kernel timings of an earlier build")
    builder.add_argument("--output_timing_cache", type=Path, metavar="FILE", help="where to keep this build's timings")
    builder.add_argument(
        "--profiling_verbosity",
        choices=PROFILING_VERBOSITIES,
        help="what plans tell of their layers; only detailed is accepted, every build checks them",
    )


def _add_precision(gpu: argparse._ArgumentGroup) -> None:
    gpu.add_argument("--dtype", choices=DTYPES, help="what the target computes in; float16 when left out")
    gpu.add_argument("--draft_dtype", choices=DTYPES, help="the same for the drafter; --dtype when left out")
    gpu.add_argument("--gpu", metavar="NAME", help='the GPU the engine is for, such as "RTX 4090": gives the next two')
    names = "; ".join(f"{backend}: {', '.join(archs)}" for backend, archs in GPU_ARCHITECTURES.items())
    gpu.add_argument("--gpu_architecture", metavar="SM[,SM]", help=f"what to compile for ({names})")
    gpu.add_argument("--gpu_memory_gib", type=float, metavar="X", help="refuse an engine that does not fit this GPU")
    gpu.add_argument(
        "--kv_cache_free_gpu_mem_fraction",
        type=float,
        metavar="X",
        help=f"part of the memory all else leaves free that the caches may take; {KV_FRACTION} when left out",
    )


def gpu_options(args: argparse.Namespace) -> GpuOptions:
    """Return the options that the flags set."""
    return GpuOptions(
        dtype=args.dtype,
        draft_dtype=args.draft_dtype,
        opt_num_tokens=args.opt_num_tokens,
        gpu=args.gpu,
        gpu_architectures=tuple(args.gpu_architecture.split(",")) if args.gpu_architecture else (),
        gpu_memory_gib=args.gpu_memory_gib,
        kv_cache_free_gpu_mem_fraction=args.kv_cache_free_gpu_mem_fraction,
        dspark_plugin=args.dspark_plugin,
        dspark_plugin_library=args.dspark_plugin_library,
        acceptance=args.acceptance,
        schedule=args.schedule,
        num_candidates=args.num_candidates,
        strip_plan=args.strip_plan,
        weight_streaming=args.weight_streaming,
        fast_build=args.fast_build,
        workers=args.workers,
        input_timing_cache=args.input_timing_cache,
        output_timing_cache=args.output_timing_cache,
        profiling_verbosity=args.profiling_verbosity,
    )
