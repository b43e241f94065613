"""`trtllm-dspark inspect`: print what an engine directory holds."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from trtllm_dspark.cli._inspect_plans import plan_rows
from trtllm_dspark.cli._tables import inspect_table, print_table
from trtllm_dspark.engine_dir import open_engine_dir, read_plan_reports
from trtllm_dspark.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--engine_dir", type=Path, required=True, help="the --output_dir of a build")
    parser.add_argument("--json", action="store_true", help="print the manifest instead of a table")
    parser.add_argument("--plans", action="store_true", help="with --json: print what the builder said of the plans")
    parser.add_argument("--layers", action="store_true", help="list every fused layer of the plans")


def run(args: argparse.Namespace) -> int:
    """Check the engine directory and print it."""
    if args.plans and not args.json:
        raise UsageError("--plans is for --json; the table shows plans anyway")
    engine = open_engine_dir(args.engine_dir)
    if args.layers and (args.json or not engine.manifest.gpu_architectures):
        raise UsageError("--layers is for the table of a GPU engine; leave it out, or use --json --plans")
    if args.json and args.plans:
        print(json.dumps([asdict(report) for report in read_plan_reports(engine)], indent=1))
    elif args.json:
        print(engine.manifest.to_json(), end="")
    else:
        print_table([*inspect_table(engine), *plan_rows(engine, all_layers=args.layers)])
    return 0
