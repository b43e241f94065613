"""`bench --url`: the measuring twin of `simulate`, against a running server."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from trtllm_dspark.cli._load_client import Endpoint, LoadClient
from trtllm_dspark.cli._load_report import command_line, print_report, write_reports
from trtllm_dspark.cli._prompts import Prompt
from trtllm_dspark.errors import UsageError
from trtllm_dspark.simulate.load_report import LoadReport, Row, ServiceLevel, read_rows
from trtllm_dspark.simulate.records import summarise
from trtllm_dspark.simulate.traffic import Process

REQUESTS_PER_USER = 4
LEAST_REQUESTS = 16


def bench_server(args: argparse.Namespace, prompts: list[Prompt]) -> int:
    """Load the server with every load of --traffic in turn, print and write the report."""
    endpoint = Endpoint.parse(args.url, api=args.api, model=args.model, raw=args.raw)
    for prompt in prompts:
        endpoint.check(prompt)
    service = None if args.sla is None else ServiceLevel.parse(args.sla)
    processes = [_process(part, args.traffic) for part in args.traffic.split(",")]
    rows = [_measure(args, endpoint, prompts, process) for process in processes]
    failed = sum(int(row.figures["failed"]) for row in rows)
    report = LoadReport(
        title=f"Measured: {args.url}",
        command=command_line(),
        facts=[
            ("server", f"{args.url}, {args.api} API over {'gRPC' if endpoint.grpc else 'HTTP'}, model {args.model}"),
            ("prompts", f"{len(prompts)} of {args.prompts_file}, at most {args.max_tokens} tokens out"),
            ("load", args.traffic),
        ],
        rows=rows + ([] if args.measured is None else read_rows(args.measured)),
        service=service,
        notes=[f"{failed} requests were refused or failed."] if failed else [],
    )
    write_reports(args.report, report)
    print(json.dumps(report.as_json(), allow_nan=False)) if args.json else print_report(report)
    return 0


def _process(part: str, whole: str) -> Process:
    kind = whole.partition(":")[0]
    return Process.parse(part if ":" in part else f"{kind}:{part}")


def _measure(args: argparse.Namespace, endpoint: Endpoint, prompts: list[Prompt], process: Process) -> Row:
    users = int(process.rate) if process.kind == "closed" else None
    count = args.requests or max(LEAST_REQUESTS, REQUESTS_PER_USER * (users or 0))
    times = process.times(count, np.random.default_rng([args.seed or 0, 7])).tolist()
    client = LoadClient(endpoint, _sampling(args))
    client.run(prompts, users=users, times=times, count=count)
    if all(record.error for record in client.records):
        raise UsageError(f"every request failed, the first with: {client.records[0].error}")
    load = f"{users} users" if users is not None else f"{process.rate:g} requests/s"
    return Row.of(args.label, load, users, summarise(client.records), measured=True)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of every request; what was not asked for is left to the server."""
    fields: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    optional = {"min_tokens": 0, "top_k": 0, "top_p": 1.0, "seed": None, "ignore_eos": False}
    fields |= {name: getattr(args, name) for name, default in optional.items() if getattr(args, name) != default}
    if args.stop:
        fields["stop" if args.api == "openai" else "stop_words"] = args.stop
    return fields
