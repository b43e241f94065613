"""`trtllm-dspark inspect`: print what an engine directory holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_dspark.cli._tables import inspect_table, print_table
from trtllm_dspark.engine_dir import open_engine_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--engine_dir", type=Path, required=True, help="the --output_dir of a build")
    parser.add_argument("--json", action="store_true", help="print the manifest instead of a table")


def run(args: argparse.Namespace) -> int:
    """Check the engine directory and print it."""
    engine = open_engine_dir(args.engine_dir)
    if args.json:
        print(engine.manifest.to_json(), end="")
    else:
        print_table(inspect_table(engine))
    return 0
