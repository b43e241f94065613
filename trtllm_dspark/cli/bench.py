"""`trtllm-dspark bench`: the same prompts through several speculation modes, interleaved; or a load on a server."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trtllm_dspark.cli._acceptance_output import record_acceptance
from trtllm_dspark.cli._bench_flags import hold_defaults, settle
from trtllm_dspark.cli._bench_server import bench_server
from trtllm_dspark.cli._drafter import add_drafter_arguments, make_drafter
from trtllm_dspark.cli._generation import (
    SPECULATION_HELP,
    add_engine_arguments,
    add_sampling_arguments,
    check_batch_size,
    check_sampling,
    make_requests,
)
from trtllm_dspark.cli._load_report import add_report_arguments, check_report_paths
from trtllm_dspark.cli._prompts import read_prompts
from trtllm_dspark.errors import DeviceError, UsageError
from trtllm_dspark.runtime import Request, Session
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.speculation import AcceptanceStatistics, SpeculationConfig

DEFAULT_MODES = "off,fixed:3,fixed:7,threshold:0.3,adaptive"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_engine_arguments(parser, required=False)
    parser.add_argument("--prompts_file", type=Path, required=True, metavar="F.jsonl", help="one 'prompt' a line")
    parser.add_argument(
        "--speculation",
        default=DEFAULT_MODES,
        metavar="MODES",
        help="modes to compare, separated by commas; 'off' is added where it is missing, and the default's fixed:G end "
        f"with the block. {SPECULATION_HELP}",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="times the whole comparison is repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--acceptance_output",
        type=Path,
        metavar="A.json",
        help="record how the engine's drafts fare on the prompts, for simulate --acceptance, and measure nothing else",
    )
    add_drafter_arguments(parser)
    add_sampling_arguments(parser)
    server = parser.add_argument_group("a running server, in place of --engine_dir")
    server.add_argument(
        "--url", metavar="URL", help="http://HOST:PORT or grpc://HOST:PORT; modes are the server's own then"
    )
    server.add_argument("--api", default="triton", choices=("triton", "openai"), help="Triton's own, or completions")
    server.add_argument("--model", default="ensemble", metavar="NAME", help="name of the server's model")
    server.add_argument(
        "--traffic",
        default="closed:1,2,4,8",
        metavar="T",
        help="closed:USERS, poisson:RATE or bursty:RATE[:FACTOR[:PERIOD_S]], several loads separated by commas",
    )
    server.add_argument("--requests", type=int, metavar="N", help="requests of each load; 4 a user when left out")
    server.add_argument("--label", default="server", metavar="NAME", help="name of the curve, as the server's mode")
    add_report_arguments(server)
    hold_defaults(parser)


@dataclass(slots=True)
class _Mode:
    """One mode and what it measured; the lists have one entry a repeat."""

    config: SpeculationConfig
    session: Session
    rates: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    acceptance: list[AcceptanceStatistics] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    check_sampling(args)
    if (args.engine_dir is None) == (args.url is None):
        raise UsageError("give --engine_dir to measure an engine here, or --url to load a server")
    modes_given = args.speculation is not None
    settle(args)
    if args.requests is not None and args.requests < 1:
        raise UsageError(f"--requests must be at least 1, got {args.requests}")
    if args.url is not None:
        check_report_paths(args.report)
        return bench_server(args, read_prompts(args.prompts_file))
    if args.acceptance_output is not None:
        profile = record_acceptance(args, read_prompts(args.prompts_file), args.acceptance_output)
        lengths = ", ".join(f"{domain} {profile.accepted_len(domain):.2f}" for domain in profile.domains)
        print(f"{args.acceptance_output}: accepted length {lengths}")
        return 0
    if args.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, got {args.repeats}")
    configs = _parse_modes(args.speculation)
    prompts = read_prompts(args.prompts_file)
    drafter = make_drafter(args)
    off = Session.open(
        args.engine_dir,
        num_threads=args.num_threads,
        speculation="off",
        acceptance=args.acceptance,
        drafter=drafter,
        kernel_library=args.kernel_library,
    )
    modes: list[_Mode] = []
    try:
        check_batch_size(args.batch_size, off)
        requests = make_requests(prompts, args, off)
        if not modes_given:
            configs = _as_short_as_blocks(configs, off)
        modes = [_Mode(config, off.sibling(speculation=config)) for config in configs]
        _warm_up(modes, requests)
        _measure(modes, requests, batch_size=args.batch_size, repeats=args.repeats)
    finally:
        for mode in modes:
            mode.session.close()
        off.close()
    report = _report(args, modes)
    print(json.dumps(report)) if args.json else _print_table(report)
    return 0


def _parse_modes(text: str) -> list[SpeculationConfig]:
    configs = list(dict.fromkeys(SpeculationConfig.parse(part) for part in text.split(",")))
    off = SpeculationConfig("off")
    return configs if off in configs else [off, *configs]


def _as_short_as_blocks(configs: Sequence[SpeculationConfig], off: Session) -> list[SpeculationConfig]:
    """Return the default modes with no more drafts than a block has."""
    longest = off.sibling(speculation="fixed").stats.max_draft_len
    return list(
        dict.fromkeys(
            config if config.draft_len is None else replace(config, draft_len=min(config.draft_len, longest))
            for config in configs
        )
    )


def _warm_up(modes: Sequence[_Mode], requests: Sequence[Request]) -> None:
    for mode in modes:
        for _ in run_closed_loop(mode.session, requests[:1], batch_size=1):
            pass


def _measure(modes: Sequence[_Mode], requests: Sequence[Request], *, batch_size: int, repeats: int) -> None:
    """Run every mode on the same few prompts before the next few, so that a busy moment hits all of them."""
    size = 1 if batch_size == 1 else 4 * batch_size
    groups = [requests[start : start + size] for start in range(0, len(requests), size)]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("measuring", total=repeats * len(groups) * len(modes))
        for repeat in range(repeats):
            for mode in modes:
                mode.tokens, mode.seconds = 0, 0.0
                mode.rounds.append(0)
            for turn, group in enumerate(groups):
                for mode in _rotated(modes, turn + repeat):
                    _run_group(mode, group, batch_size)
                    bar.advance(task)
            for mode in modes:
                mode.rates.append(mode.tokens / mode.seconds)


def _rotated(modes: Sequence[_Mode], turn: int) -> Iterator[_Mode]:
    return (modes[(turn + index) % len(modes)] for index in range(len(modes)))


def _run_group(mode: _Mode, group: Sequence[Request], batch_size: int) -> None:
    start = time.perf_counter()
    finished = [output for output in run_closed_loop(mode.session, group, batch_size=batch_size) if output.finished]
    mode.seconds += time.perf_counter() - start
    for output in finished:
        if output.error is not None:
            raise DeviceError(f"prompt {output.request_id} failed: {output.error}")
        mode.tokens += output.stats.num_output_tokens
        mode.rounds[-1] += output.stats.acceptance.rounds
        mode.acceptance.append(output.stats.acceptance)
        if output.stats.ttft_ms is not None:
            mode.ttft_ms.append(output.stats.ttft_ms)


def _report(args: argparse.Namespace, modes: Sequence[_Mode]) -> dict[str, Any]:
    off = next(mode for mode in modes if mode.config.mode == "off")
    return {
        "engine_dir": str(args.engine_dir),
        "batch_size": args.batch_size,
        "modes": [
            {
                "speculation": str(mode.config),
                "tokens_per_s": statistics.median(mode.rates),
                "accepted_len": _accepted_len(mode.acceptance),
                "ratio_to_off": statistics.median(
                    rate / base for rate, base in zip(mode.rates, off.rates, strict=True)
                ),
                "ttft_ms": statistics.median(mode.ttft_ms),
                "rounds": statistics.median_low(mode.rounds),
            }
            for mode in modes
        ],
    }


def _accepted_len(acceptance: Sequence[AcceptanceStatistics]) -> float | None:
    rounds = sum(entry.rounds for entry in acceptance)
    return sum(entry.emitted for entry in acceptance) / rounds if rounds else None


def _print_table(report: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("speculation")
    for name in ("tokens/s", "ratio to off", "accepted length", "first token ms", "rounds"):
        table.add_column(name, justify="right")
    for mode in report["modes"]:
        accepted_len = mode["accepted_len"]
        table.add_row(
            mode["speculation"],
            f"{mode['tokens_per_s']:.1f}",
            f"{mode['ratio_to_off']:.3f}",
            "none" if accepted_len is None else f"{accepted_len:.2f}",
            f"{mode['ttft_ms']:.1f}",
            str(mode["rounds"]),
        )
    Console(soft_wrap=True, highlight=False).print(table)
