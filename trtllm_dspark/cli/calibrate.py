"""`trtllm-dspark calibrate`: fit the confidence head's temperatures and biases on what prompts show."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from trtllm_dspark.cli._generation import (
    add_engine_arguments,
    add_sampling_arguments,
    check_sampling,
    make_measured_requests,
)
from trtllm_dspark.cli._prompts import read_prompts
from trtllm_dspark.cli._reliability_plot import check_plot, write_plot
from trtllm_dspark.cli._tables import print_table
from trtllm_dspark.engine import Engine, load_engine
from trtllm_dspark.engine_dir import EngineDirectory, open_engine_dir
from trtllm_dspark.errors import ConfigError, DeviceError, RequestError, UsageError
from trtllm_dspark.evaluation import drafter_traits
from trtllm_dspark.runtime import Request, Session, Tokenizer
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.speculation import Calibration, ConfidenceRecorder
from trtllm_dspark.speculation.calibration import Observations, Quality, evaluate, noise_floor
from trtllm_dspark.speculation.calibration_file import write_calibration, write_sts_temperatures
from trtllm_dspark.speculation.fit import fit_calibration

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--prompts_file", type=Path, nargs="+", required=True, metavar="F.jsonl", help="prompts to fit on"
    )
    parser.add_argument(
        "--eval_prompts_file", type=Path, metavar="F.jsonl", help="other prompts to judge the fit by; never fitted on"
    )
    parser.add_argument("--max_prompts", type=int, metavar="N", help="at most N prompts of each file, evenly spread")
    parser.add_argument(
        "--sts_output",
        type=Path,
        metavar="F.json",
        help="also write temperatures fitted without a bias, in the layout of other servers (key sts_temperatures)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="F.svg", help="also draw what confidences promise against what happened"
    )
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate with every block verified in full, fit, write `calibration.json` and print what it changed."""
    check_sampling(args)
    if args.max_prompts is not None and args.max_prompts < 1:
        raise UsageError(f"--max_prompts must be at least 1, got {args.max_prompts}")
    if args.plot is not None:
        check_plot(args.plot)
    directory = open_engine_dir(args.engine_dir)
    engine = load_engine(
        args.engine_dir, num_threads=args.num_threads, verify_hashes=False, kernel_library=args.kernel_library
    )
    try:
        _check_engine(engine, args)
        observed = _observe(engine, directory, args.prompts_file, args, first=0)
        fitted = fit_calibration(observed)
        judged = observed
        if args.eval_prompts_file is not None:
            first = len(args.prompts_file)
            judged = _observe(engine, directory, [args.eval_prompts_file], args, first=first)
            if not len(judged):
                raise UsageError(
                    f"--eval_prompts_file {args.eval_prompts_file} gives no whole block; raise --max_tokens"
                )
    finally:
        engine.close()
    raw = Calibration.identity(engine.limits.max_draft_len)
    before, after = evaluate(raw, judged), evaluate(fitted, judged)
    floor = noise_floor(fitted, judged)
    path = write_calibration(directory, fitted, _facts(args, observed, judged, before, after, floor))
    if args.plot is not None:
        write_plot(args.plot, judged, [("as the head gives them", raw), ("calibrated", fitted)])
    if args.sts_output is not None:
        write_sts_temperatures(args.sts_output, fit_calibration(observed, with_bias=False))
    where = "the prompts it was fitted on" if judged is observed else str(args.eval_prompts_file)
    rows = [("calibration", str(path)), ("fitted on", f"{len(observed)} blocks")]
    rows.append(("judged on", f"{len(judged)} blocks of {where}"))
    print_table([*rows, *_quality_rows(fitted, before, after, floor)])
    if after.mean_ece > before.mean_ece:
        logger.warning("the calibration error rose on %s; fit on more prompts, or delete %s", where, path)
    return 0


def _check_engine(engine: Engine, args: argparse.Namespace) -> None:
    if not engine.limits.has_drafter or not drafter_traits(engine, None).has_confidence:
        raise ConfigError("this engine's drafter has no confidence head; there is nothing to calibrate")
    if not 1 <= args.batch_size <= engine.limits.max_batch_size:
        raise ConfigError(
            f"--batch_size must be from 1 to the engine's {engine.limits.max_batch_size}, got {args.batch_size}"
        )
    needed = args.batch_size * (engine.limits.max_draft_len + 1)
    if needed > engine.limits.max_num_tokens:
        # A block that does not fit is cut, and cut blocks teach nothing.
        raise ConfigError(
            f"--batch_size {args.batch_size} needs {needed} tokens a pass to verify whole blocks, the engine has "
            f"{engine.limits.max_num_tokens}; lower it"
        )


def _observe(
    engine: Engine, directory: EngineDirectory, paths: Sequence[Path], args: argparse.Namespace, *, first: int
) -> Observations:
    """Generate from the prompts of the files and return every block that was verified in full.

    Args:
        engine: what generates.
        directory: of the engine.
        paths: of the prompts.
        args: the flags.
        first: number of the first file among those of the command; no two share random draws.
    """
    recorder = ConfidenceRecorder(engine.limits.max_draft_len)
    session = Session(
        engine, Tokenizer.open(directory), speculation="fixed", acceptance=args.acceptance, recorder=recorder
    )
    requests = [request for index, path in enumerate(paths, first) for request in _requests(path, index, args, session)]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("generating", total=len(requests))
        for output in run_closed_loop(session, requests, batch_size=args.batch_size):
            if output.error is not None:
                raise DeviceError(f"prompt {output.request_id} failed: {output.error}")
            bar.advance(task, int(output.finished))
    return recorder.observations()


def _requests(path: Path, index: int, args: argparse.Namespace, session: Session) -> list[Request]:
    prompts = read_prompts(path)
    if args.max_prompts is not None and len(prompts) > args.max_prompts:
        prompts = [prompts[turn * len(prompts) // args.max_prompts] for turn in range(args.max_prompts)]
    requests = []
    for prompt in prompts:
        try:
            requests += make_measured_requests([prompt], args, session, file=index)
        except RequestError as error:
            if error.code != "prompt_too_long":
                raise RequestError(f"{path} line {prompt.index + 1}: {error}", code=error.code) from error
            logger.warning("%s line %d is left out: %s", path, prompt.index + 1, error)
    return [replace(request, request_id=f"{index}:{request.request_id}") for request in requests]


def _facts(
    args: argparse.Namespace,
    observed: Observations,
    judged: Observations,
    before: Quality,
    after: Quality,
    floor: float,
) -> dict[str, Any]:
    return {
        "blocks": len(observed),
        "judged_blocks": len(judged),
        "judged_on_other_prompts": judged is not observed,
        "sampling_temperature": args.temperature,
        "acceptance": args.acceptance,
        "ece_before": [round(value, 6) for value in before.ece],
        "ece_after": [round(value, 6) for value in after.ece],
        "ece_floor": round(floor, 6),
    }


def _quality_rows(fitted: Calibration, before: Quality, after: Quality, floor: float) -> list[tuple[str, str]]:
    rows = []
    for position, (temperature, bias) in enumerate(zip(fitted.temperature, fitted.bias, strict=True)):
        rows.append(
            (
                f"position {position + 1}",
                f"temperature {temperature:.3f}, bias {bias:+.3f}, "
                f"ECE {before.ece[position]:.4f} -> {after.ece[position]:.4f}, "
                f"AUC {before.auc[position]:.3f} -> {after.auc[position]:.3f}",
            )
        )
    rows.append(("mean", f"ECE {before.mean_ece:.4f} -> {after.mean_ece:.4f}"))
    return [*rows, ("", f"a calibration without any error would show {floor:.4f} on as many blocks")]
