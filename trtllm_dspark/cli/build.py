"""`trtllm-dspark build`: compile a target and its drafter into an engine directory."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_dspark.build import BuildConfig
from trtllm_dspark.build._choices import BACKENDS, WEIGHT_DTYPES
from trtllm_dspark.cli._gpu_flags import add_gpu_arguments, gpu_options
from trtllm_dspark.cli._removed_flags import refuse_removed_flags
from trtllm_dspark.cli._tables import build_table, estimate_table, print_table
from trtllm_dspark.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from trtllm_dspark.build import BuildReport
    from trtllm_dspark.build.plan import BuildPlan
    from trtllm_dspark.build.report import Progress

logger = logging.getLogger(__name__)

DEFAULT_THREADS = 2
"""What `run` and `serve` use unless told otherwise: a table counts for one number of threads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; names are `trtllm-build`'s wherever the meaning is the same."""
    paths = parser.add_argument_group("input and output")
    paths.add_argument(
        "--target_checkpoint",
        metavar="PATH",
        help="target model: a GGUF file, a Hugging Face directory, or package:NAME for one inside a Python package",
    )
    paths.add_argument(
        "--draft_checkpoint", metavar="PATH", help="DSpark drafter; without one the engine only decodes plainly"
    )
    paths.add_argument(
        "--model_config", metavar="PATH", help="in place of a target: its config.json alone, for --dry_run"
    )
    paths.add_argument(
        "--draft_model_config", metavar="PATH", help="in place of a drafter: its config.json alone, for --dry_run"
    )
    paths.add_argument("--output_dir", type=Path, default=Path("engine_outputs"), help="engine directory to write")
    paths.add_argument("--overwrite", action="store_true", help="replace the engine that --output_dir holds")
    paths.add_argument(
        "--dry_run", action="store_true", help="print the resolved configuration and sizes as JSON, stop"
    )

    limits = parser.add_argument_group("limits")
    limits.add_argument("--max_batch_size", type=int, default=8, metavar="N", help="requests that decode at once")
    limits.add_argument(
        "--max_seq_len",
        "--max_decoder_seq_len",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of a request, prompt and output together",
    )
    limits.add_argument("--max_num_tokens", type=int, default=256, metavar="N", help="tokens of one pass of the target")
    limits.add_argument(
        "--max_draft_len",
        type=int,
        metavar="N",
        help="most draft tokens verified of one block; the drafter's block size when left out",
    )

    weights = parser.add_argument_group("weights and backend")
    weights.add_argument("--backend", default="onnxruntime", metavar="|".join(BACKENDS), help="compiler and runtime")
    formats = sorted({name for names in WEIGHT_DTYPES.values() for name in names})
    weights.add_argument(
        "--weight_dtype",
        metavar="|".join(formats),
        help="storage of the linear layers: int8, float32 or w8a8 for onnxruntime (int8 when left out); weight-only "
        "int8, int4 or fp8 for GPU engines (--dtype when left out)",
    )
    weights.add_argument(
        "--draft_weight_dtype",
        metavar="|".join(formats),
        help="the same for the drafter; --weight_dtype when left out",
    )
    add_gpu_arguments(parser)

    vocab = parser.add_argument_group("draft vocabulary")
    vocab.add_argument(
        "--draft_vocab_size", type=int, metavar="N", help="tokens the drafter proposes from; all when left out"
    )
    vocab.add_argument(
        "--draft_vocab_counts", type=Path, metavar="FILE", help="token counts that choose them (docs/file_formats.md)"
    )
    profile = parser.add_argument_group("cost table")
    profile.add_argument(
        "--no_profile", action="store_true", help="do not measure the new engine; trtllm-dspark profile does it later"
    )
    refuse_removed_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Build, or print what would be built."""
    targets = [value for value in (args.target_checkpoint, args.model_config) if value is not None]
    drafters = [value for value in (args.draft_checkpoint, args.draft_model_config) if value is not None]
    if len(targets) != 1 or len(drafters) > 1:
        raise UsageError(
            "give the target once, with --target_checkpoint or --model_config, and the drafter at most once, with "
            "--draft_checkpoint or --draft_model_config"
        )
    weightless = args.model_config is not None or args.draft_model_config is not None
    if weightless and not args.dry_run:
        raise UsageError(
            "--model_config and --draft_model_config describe models without weights; add --dry_run, or give the "
            "weights with --target_checkpoint and --draft_checkpoint"
        )
    config = BuildConfig(
        target_checkpoint=targets[0],
        draft_checkpoint=drafters[0] if drafters else None,
        output_dir=args.output_dir,
        backend=args.backend,
        weight_dtype=args.weight_dtype,
        draft_weight_dtype=args.draft_weight_dtype,
        max_batch_size=args.max_batch_size,
        max_seq_len=args.max_seq_len,
        max_num_tokens=args.max_num_tokens,
        max_draft_len=args.max_draft_len,
        draft_vocab_size=args.draft_vocab_size,
        draft_vocab_counts=args.draft_vocab_counts,
        gpu=gpu_options(args),
        overwrite=args.overwrite,
        weights_optional=args.dry_run,
    )
    if args.no_profile and config.backend != "onnxruntime":
        raise UsageError(f"--no_profile is for onnxruntime, a {config.backend} build measures nothing; leave it out")
    if args.dry_run:
        from trtllm_dspark.build.plan import plan_build

        print(json.dumps(plan_build(config).as_json(), indent=2))
        return 0
    report = _build_with_bar(config)
    print_table(build_table(report))
    if config.backend == "onnxruntime" and not args.no_profile:
        _write_quick_table(config.output_dir)
    return 0


def _write_quick_table(engine_dir: Path) -> None:
    """Measure the new engine for its first users; times that must not decide anything are not kept."""
    from trtllm_dspark.cli.profile import measure_and_store
    from trtllm_dspark.engine_dir import open_engine_dir

    try:
        measure_and_store(open_engine_dir(engine_dir, verify_hashes=False), num_threads=DEFAULT_THREADS, quick=True)
    except ConfigError as error:
        logger.warning("no cost table was written: %s, with trtllm-dspark profile", error)
        return
    print_table([("cost table", "quick; trtllm-dspark profile measures more depths and lengths")])


def _build_with_bar(config: BuildConfig) -> BuildReport:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from trtllm_dspark.build import build_engine

    console = Console(stderr=True)
    if not console.is_terminal:
        return build_engine(config, progress=_log_steps(), announce=_announce)
    columns = (TextColumn("{task.description:<18}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        return build_engine(
            config,
            progress=lambda step, done: bar.update(task, description=step, completed=done),
            announce=_announce,
        )


def _announce(plan: BuildPlan) -> None:
    """Print what a GPU engine will take before minutes of work."""
    if plan.device_memory is not None:
        print_table(estimate_table(plan))


def _log_steps() -> Progress:
    """Return a progress callback for a stderr that is no terminal: one line a step."""
    last = ""

    def tell(step: str, done: float) -> None:
        nonlocal last
        if step != last:
            logger.info("%s (%.0f %% done)", step, 100 * done)
            last = step

    return tell
