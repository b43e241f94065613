"""`trtllm-dspark simulate`: what a server would do under a load, by the code that serves and a table of times."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from trtllm_dspark.cli._load_report import (
    add_report_arguments,
    check_report_paths,
    command_line,
    print_report,
    write_reports,
)
from trtllm_dspark.errors import ConfigError, UsageError
from trtllm_dspark.simulate.acceptance import AcceptanceProfile, read_acceptance
from trtllm_dspark.simulate.cluster_view import timelines
from trtllm_dspark.simulate.faults import Fault
from trtllm_dspark.simulate.load_report import LoadReport, Row, ServiceLevel, read_rows
from trtllm_dspark.simulate.published import PUBLISHED, published
from trtllm_dspark.simulate.router import ROUTERS
from trtllm_dspark.simulate.scaling import Autoscaler
from trtllm_dspark.simulate.scenario import Run, Scenario, Simulator, parse_domains
from trtllm_dspark.simulate.server import Policy, parse_policies
from trtllm_dspark.simulate.server_file import Overrides, load_server, write_server
from trtllm_dspark.simulate.traffic import Lengths, Process, Traffic, make_traffic, read_trace

DEFAULT_POLICIES = "off,fixed:3,adaptive"
REQUESTS_PER_USER = 12
LEAST_REQUESTS = 60
_LIMITS = {
    "max_batch_size": "requests with a slot; estimates: as many as the memory holds, at most 256 when left out",
    "max_seq_len": "tokens of a request at most, prompt and output; estimates: 4,096 when left out",
    "max_num_tokens": "tokens of a round at most; estimates: 2,048 when left out, or whole blocks of all requests",
    "max_draft_len": "gamma, draft tokens of a block; estimates: the model's own when left out",
    "max_queue_size": "requests that may wait, further ones are refused; what a file says when left out, else 100,000",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--cost_table",
        required=True,
        metavar="C",
        help="an engine directory that was profiled, a cost table file, or an estimate: h100, h200, b200, l40s, "
        "rtx4090 or rtx5090, a colon and qwen3-4b, qwen3-8b, qwen3-14b or v4-flash-like; 8xh200:... for eight GPUs",
    )
    parser.add_argument(
        "--acceptance",
        required=True,
        metavar="A",
        help=f"a profile that bench --acceptance_output recorded, or a published one: {', '.join(PUBLISHED)}",
    )
    parser.add_argument(
        "--traffic",
        default="closed:1,2,4,8,16,32,64",
        metavar="T",
        help="closed:USERS, poisson:RATE or bursty:RATE[:FACTOR[:PERIOD_S]], several loads separated by commas, "
        "or a JSONL trace",
    )
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICIES,
        metavar="P",
        help="policies separated by commas: every form of --speculation, and mtpK for K drafts of an MTP module",
    )
    parser.add_argument("--mtp_acceptance", metavar="X[,X...]", help="acceptance of an MTP module's drafts by position")
    parser.add_argument("--requests", type=int, metavar="N", help="requests of each load; 12 a user when left out")
    lengths = "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"
    parser.add_argument("--prompt_tokens", default="lognormal:256:0.8", metavar="L", help=f"prompt lengths: {lengths}")
    parser.add_argument("--output_tokens", default="lognormal:256:0.5", metavar="L", help="the same, of outputs")
    parser.add_argument("--domains", metavar="D", help="NAME=WEIGHT,...; all domains alike when left out")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same result")
    limits = parser.add_argument_group("limits, where they differ from the table's")
    for name, meaning in _LIMITS.items():
        limits.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    limits.add_argument(
        "--host_us",
        type=float,
        metavar="X",
        help="microseconds a round takes beside the passes; what a file says when left out, else 0",
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--replicas", type=int, default=1, metavar="N", help="servers behind the router")
    cluster.add_argument("--router", default="round_robin", choices=ROUTERS, help="who gets the next request")
    cluster.add_argument(
        "--autoscale", metavar="LEAST:MOST[:STARTUP_S[:COOLDOWN_S]]", help="scale on waiting requests and used slots"
    )
    cluster.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="F",
        help="throttle:REPLICA:AT_S:FOR_S:CLOCK or lost:REPLICA:AT_S:FOR_S; repeatable",
    )
    cluster.add_argument("--nvml", action="store_true", help="servers read their device and adapt to it (docs/load.md)")
    parser.add_argument("--write_cost_table", type=Path, metavar="F.json", help="keep the times and limits it used")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate, print and write the report."""
    check_report_paths(args.report)
    service = None if args.sla is None else ServiceLevel.parse(args.sla)
    policies = parse_policies(args.policy)
    scenario = _scenario(args)
    loads = _loads(args, scenario)
    measured = [] if args.measured is None else read_rows(args.measured)
    if args.write_cost_table is not None:
        write_server(args.write_cost_table, scenario.server)
    runs = _simulate(Simulator(scenario), policies, loads)
    report = LoadReport(
        title=f"Simulated: {scenario.server.name}",
        command=command_line(),
        facts=_facts(scenario, args),
        rows=[Row.of(r.policy.name, r.load, r.users, r.summary, measured=False) for r in runs] + measured,
        estimated=scenario.server.estimated,
        service=service,
        notes=_notes(runs),
        timelines=timelines(runs) if scenario.replicas > 1 or scenario.autoscaling is not None else (),
    )
    write_reports(args.report, report)
    print(json.dumps(report.as_json(), allow_nan=False)) if args.json else print_report(report)
    return 0


def _scenario(args: argparse.Namespace) -> Scenario:
    for name in (*_LIMITS, "requests"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {args.seed}")
    if args.host_us is not None and not 0 <= args.host_us < float("inf"):
        raise UsageError(f"--host_us must be at least 0, got {args.host_us}")
    if args.autoscale is not None:
        Autoscaler.parse(args.autoscale)
    server = load_server(
        args.cost_table, Overrides(**{name: getattr(args, name) for name in _LIMITS}, host_us=args.host_us)
    )
    acceptance = published(args.acceptance) if args.acceptance in PUBLISHED else read_acceptance(Path(args.acceptance))
    return Scenario(
        server,
        acceptance,
        others=None if args.mtp_acceptance is None else _mtp(args.mtp_acceptance, acceptance),
        seed=args.seed,
        replicas=args.replicas,
        router=args.router,
        faults=tuple(map(Fault.parse, args.fault)),
        autoscaling=args.autoscale,
        nvml=args.nvml,
    )


def _mtp(text: str, acceptance: AcceptanceProfile) -> AcceptanceProfile:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--mtp_acceptance '{text}' must hold numbers from 0 to 1") from error
    return AcceptanceProfile("mtp", f"assumed: {text}", dict.fromkeys(acceptance.domains, values))


def _loads(args: argparse.Namespace, scenario: Scenario) -> list[Traffic]:
    path = Path(args.traffic)
    if path.is_file():
        return [read_trace(path, scenario.acceptance.domains)]
    prompt, output = Lengths.parse(args.prompt_tokens), Lengths.parse(args.output_tokens)
    domains = parse_domains(args.domains, scenario.acceptance)
    kind, loads = "", []
    for part in args.traffic.split(","):
        kind = part.partition(":")[0] if ":" in part else kind
        process = Process.parse(part if ":" in part else f"{kind}:{part}")
        users = int(process.rate) if process.kind == "closed" else 0
        count = args.requests or max(LEAST_REQUESTS, REQUESTS_PER_USER * users)
        loads.append(make_traffic(process, count=count, prompt=prompt, output=output, domains=domains, seed=args.seed))
    return loads


def _simulate(simulator: Simulator, policies: Sequence[Policy], loads: Sequence[Traffic]) -> list[Run]:
    console = Console(stderr=True)
    runs = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("simulating", total=len(policies) * len(loads))
        for policy in policies:
            for load in loads:
                runs.append(simulator.run(policy, load))
                bar.advance(task)
    return runs


def _facts(scenario: Scenario, args: argparse.Namespace) -> list[tuple[str, str]]:
    server, profile = scenario.server, scenario.acceptance
    facts = [
        ("server", f"{server.name} ({'estimated' if server.estimated else 'measured'} times)"),
        (
            "limits",
            f"{server.max_batch_size} requests of {server.max_seq_len} tokens, {server.max_num_tokens} tokens a round, "
            f"{server.max_draft_len} drafts; no preemption: a request keeps its slot to its end",
        ),
        ("acceptance", f"{profile.name}: {profile.source}"),
        ("accepted length", ", ".join(f"{name} {profile.accepted_len(name):.2f}" for name in profile.domains)),
        ("load", f"{args.traffic}; prompts {args.prompt_tokens}, outputs {args.output_tokens}; seed {args.seed}"),
    ]
    if scenario.others is not None:
        facts.append(("acceptance of mtp", scenario.others.source))
    if scenario.replicas > 1 or args.fault or args.autoscale:
        text = f"{scenario.replicas} replicas, {scenario.router}, {'reading' if scenario.nvml else 'not reading'} NVML"
        facts.append(("cluster", "; ".join([text, *args.fault, *([args.autoscale] if args.autoscale else [])])))
    return facts


def _notes(runs: Sequence[Run]) -> list[str]:
    failed = sum(run.summary.failed for run in runs)
    retries = sum(run.result.retries for run in runs)
    notes = [f"{failed} requests were refused or failed."] if failed else []
    return notes + ([f"{retries} requests were sent again because their server was lost."] if retries else [])
