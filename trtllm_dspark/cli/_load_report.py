"""What `simulate` and `bench` share: the flags of a report, and writing it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtllm_dspark.errors import UsageError
from trtllm_dspark.reports.files import csv_text, json_text, write_text
from trtllm_dspark.simulate.load_page import frontier_plot, load_page
from trtllm_dspark.simulate.load_report import LoadReport

SUFFIXES = (".html", ".json", ".csv", ".svg")


def add_report_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare --report, --sla and --measured."""
    parser.add_argument(
        "--report",
        type=Path,
        action="append",
        default=[],
        metavar="F",
        help="write the report as .html (one page, no network), .json or .csv, or its first plot as .svg; repeatable",
    )
    parser.add_argument(
        "--sla", metavar="tok_s_user=X", help="what every user must get; the report says who reaches it"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="F.json",
        help="a report of bench as JSON: its measured curves are drawn beside these",
    )


def check_report_paths(paths: list[Path]) -> None:
    """Refuse a report that could not be written, before anything runs.

    Raises:
        UsageError: an unknown suffix, or a folder that does not exist.
    """
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise UsageError(f"--report {path} must end in {', '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise UsageError(f"--report {path}: the folder {path.parent} does not exist; make it first")


def command_line(argv: list[str] | None = None) -> str:
    """Return the exact command that runs, as a shell reads it."""
    return shlex.join(["trtllm-dspark", *(sys.argv[1:] if argv is None else argv)])


def write_reports(paths: list[Path], report: LoadReport) -> None:
    """Write a report in the form its suffix names."""
    for path in paths:
        if path.suffix == ".html":
            write_text(path, load_page(report))
        elif path.suffix == ".svg":
            write_text(path, frontier_plot(report))
        elif path.suffix == ".json":
            write_text(path, json_text(report.as_json()))
        else:
            write_text(path, csv_text([row.as_json() for row in report.rows]))


def print_report(report: LoadReport) -> None:
    """Print the figures as a table, and the advice."""
    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    table.add_column("load")
    columns = (
        ("tokens/s", "tokens_per_s", ".1f"),
        ("per user", "user_tokens_per_s", ".1f"),
        ("first token ms", "ttft_ms_p50", ".1f"),
        ("drafts verified", "verify_budget", ".2f"),
        ("accepted length", "accepted_len", ".2f"),
        ("wasted", "wasted_share", ".2f"),
        ("failed", "failed", "d"),
    )
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    for row in report.rows:
        cells = [_cell(row.figures.get(key), form) for _, key, form in columns]
        table.add_row(row.curve, row.load, *cells)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    if report.estimated:
        console.print("estimated: pass times come from public figures, not from a measurement")
    console.print(report.advice(), markup=False)


def _cell(value: object, form: str) -> str:
    return "none" if value is None else format(value, form)
