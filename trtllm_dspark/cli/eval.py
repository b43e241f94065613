"""`trtllm-dspark eval`: what an engine's drafter is worth on prompts, by domain and temperature."""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trtllm_dspark.cli._drafter import add_drafter_arguments, make_drafter
from trtllm_dspark.cli._generation import (
    add_engine_arguments,
    add_sampling_arguments,
    check_sampling,
    make_measured_requests,
)
from trtllm_dspark.cli._prompts import Prompt, read_prompts
from trtllm_dspark.engine import Engine, load_engine
from trtllm_dspark.engine_dir import EngineDirectory, open_engine_dir
from trtllm_dspark.errors import ConfigError, UsageError
from trtllm_dspark.evaluation import DomainResult, EvaluationRun, drafter_traits, run_domain, summarise
from trtllm_dspark.evaluation.measure import DrafterTraits
from trtllm_dspark.evaluation.results import merge
from trtllm_dspark.runtime import Session, Tokenizer
from trtllm_dspark.runtime.proposers import ProposerFactory
from trtllm_dspark.runtime.scheduling import load_calibration
from trtllm_dspark.speculation.calibration import Quality

logger = logging.getLogger(__name__)

DEFAULT_TEMPERATURES = "0,1"
UNNAMED = "prompts"
"""Domain of prompts that name none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--prompts_file", type=Path, required=True, metavar="F.jsonl", help="one 'prompt' (and 'domain') a line"
    )
    parser.add_argument(
        "--temperatures", default=DEFAULT_TEMPERATURES, metavar="X,Y", help="evaluate at each of these temperatures"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--output", type=Path, metavar="F.json", help="also write the JSON object to a file")
    add_drafter_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate every domain at every temperature and print."""
    temperatures = _temperatures(args)
    prompts = read_prompts(args.prompts_file)
    if any("temperature" in prompt.sampling for prompt in prompts):
        raise UsageError(f"--prompts_file {args.prompts_file} sets 'temperature'; leave it to --temperatures")
    directory = open_engine_dir(args.engine_dir)
    engine = load_engine(
        args.engine_dir, num_threads=args.num_threads, verify_hashes=False, kernel_library=args.kernel_library
    )
    try:
        drafter = make_drafter(args)
        traits = drafter_traits(engine, drafter)
        check_whole_blocks(engine, args.batch_size, traits.draft_len)
        results = _evaluate(engine, directory, prompts, temperatures, drafter, traits, args)
    finally:
        engine.close()
    report = _report(args, directory, results)
    text = json.dumps(report, allow_nan=False)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")
    print(text) if args.json else _print_tables(results)
    return 0


def check_whole_blocks(engine: Engine, batch_size: int, draft_len: int) -> None:
    """Refuse a batch that does not fit the engine, or whose whole blocks do not fit a pass.

    Raises:
        ConfigError: it does not fit.
    """
    limits = engine.limits
    if not 1 <= batch_size <= limits.max_batch_size:
        raise ConfigError(f"--batch_size must be from 1 to the engine's {limits.max_batch_size}, got {batch_size}")
    needed = batch_size * (draft_len + 1)
    if needed > limits.max_num_tokens:
        raise ConfigError(
            f"--batch_size {batch_size} needs {needed} tokens a pass to verify whole blocks, the engine has "
            f"{limits.max_num_tokens}; lower it"
        )


def _temperatures(args: argparse.Namespace) -> list[float]:
    if args.temperature:
        raise UsageError("eval takes --temperatures (several, separated by commas), not --temperature")
    try:
        values = [float(part) for part in args.temperatures.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(value >= 0 and math.isfinite(value) for value in values):
        raise UsageError(f"--temperatures '{args.temperatures}' must be numbers of at least 0, separated by commas")
    for value in values:
        check_sampling(argparse.Namespace(**vars(args) | {"temperature": value}))
    return list(dict.fromkeys(values))


def _evaluate(
    engine: Engine,
    directory: EngineDirectory,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    drafter: ProposerFactory | None,
    traits: DrafterTraits,
    args: argparse.Namespace,
) -> list[DomainResult]:
    tokenizer = Tokenizer.open(directory)
    # The stored calibration is of the engine's own confidence head.
    calibration = load_calibration(directory) if drafter is None and traits.has_confidence else None
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.domain or UNNAMED, []).append(prompt)
    # Every request is made before the first pass, so that a bad line is known at once.
    checker = Session(engine, tokenizer, speculation="off")
    planned = [
        (temperature, domain, _requests(group, args, checker, temperature))
        for temperature in temperatures
        for domain, group in groups.items()
    ]
    console = Console(stderr=True)
    runs: dict[tuple[float, str], EvaluationRun] = {}
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("evaluating", total=sum(len(requests) for _, _, requests in planned))
        for temperature, domain, requests in planned:
            runs[temperature, domain] = run_domain(
                engine,
                tokenizer,
                requests,
                batch_size=args.batch_size,
                acceptance=args.acceptance,
                drafter=drafter,
                finished=lambda: bar.advance(task),
            )
    if len(groups) > 1:
        for temperature in temperatures:
            runs[temperature, "all"] = merge([runs[temperature, domain] for domain in groups])
    return [
        summarise(domain, temperature, entry, gamma=traits.draft_len, calibration=calibration)
        for (temperature, domain), entry in sorted(runs.items(), key=lambda item: temperatures.index(item[0][0]))
    ]


def _requests(prompts: Sequence[Prompt], args: argparse.Namespace, session: Session, temperature: float) -> list[Any]:
    settings = argparse.Namespace(**vars(args) | {"temperature": temperature})
    return make_measured_requests(prompts, settings, session)


def _report(args: argparse.Namespace, directory: EngineDirectory, results: Sequence[DomainResult]) -> dict[str, Any]:
    return {
        "engine_dir": str(args.engine_dir),
        "engine_hash": directory.manifest.engine_hash,
        "prompts_file": str(args.prompts_file),
        "max_tokens": args.max_tokens,
        "acceptance": args.acceptance,
        "drafter": args.drafter,
        "results": [result.as_json() for result in results],
    }


def _print_tables(results: Sequence[DomainResult]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    gamma = len(results[0].conditional_acceptance)
    table = Table(box=None, pad_edge=False, title="acceptance", title_justify="left")
    table.add_column("domain")
    for name in ("T", "rounds", "accepted length", "95 % interval", *(f"c{k + 1}" for k in range(gamma))):
        table.add_column(name, justify="right")
    for result in results:
        interval = result.accepted_len_interval
        table.add_row(
            result.domain,
            f"{result.temperature:g}",
            str(result.rounds),
            _number(result.accepted_len, 2),
            "none" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
            *(_number(value, 3) for value in result.conditional_acceptance),
        )
    console.print(table)
    judged = [(result, result.quality) for result in results if result.quality is not None]
    if judged:
        console.print(_quality_table(judged))
        console.print(_sweep_table([result for result, _ in judged]))


def _quality_table(judged: Sequence[tuple[DomainResult, Quality]]) -> Table:
    table = Table(box=None, pad_edge=False, title="\nconfidence (survival of each position)", title_justify="left")
    table.add_column("domain")
    for name in ("T", "mean ECE", "calibrated", "AUC first", "AUC last"):
        table.add_column(name, justify="right")
    for result, quality in judged:
        auc = [value for value in quality.auc if not math.isnan(value)]
        table.add_row(
            result.domain,
            f"{result.temperature:g}",
            f"{quality.mean_ece:.4f}",
            "none" if result.calibrated is None else f"{result.calibrated.mean_ece:.4f}",
            _number(auc[0] if auc else None, 3),
            _number(auc[-1] if auc else None, 3),
        )
    return table


def _sweep_table(results: Sequence[DomainResult]) -> Table:
    table = Table(box=None, pad_edge=False, title="\nthreshold: verified / accepted length", title_justify="left")
    table.add_column("domain")
    table.add_column("T", justify="right")
    for point in results[0].sweep:
        table.add_column(f"{point.threshold:g}", justify="right")
    for result in results:
        cells = (f"{point.verified:.2f} / {point.accepted_len:.2f}" for point in result.sweep)
        table.add_row(result.domain, f"{result.temperature:g}", *cells)
    return table


def _number(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
