"""`trtllm-dspark profile`: measure what the engine's passes cost, for the modes that schedule by cost."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from trtllm_dspark.cli._cost_plot import check_plot, write_plot
from trtllm_dspark.cli._tables import print_table
from trtllm_dspark.engine import Engine, load_engine
from trtllm_dspark.engine.device import device_name
from trtllm_dspark.engine_dir import EngineDirectory, open_engine_dir
from trtllm_dspark.errors import UsageError
from trtllm_dspark.load.nvml_reader import NvmlReader
from trtllm_dspark.runtime.proposers import own_proposer
from trtllm_dspark.runtime.stats import SessionStats
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation import CostTable, measure_cost_table
from trtllm_dspark.speculation.cost_table import check_cost_table, make_monotone
from trtllm_dspark.speculation.cost_table_file import StoredCostTable, write_cost_table
from trtllm_dspark.speculation.measure import device_timer

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--engine_dir", type=Path, required=True, help="the --output_dir of a build")
    parser.add_argument(
        "--num_threads", type=int, default=2, metavar="N", help="CPU threads of a pass; a table counts for this number"
    )
    parser.add_argument(
        "--kernel_library", type=Path, metavar="F.so", help="TensorRT engines: times whole rounds on the GPU, as served"
    )
    parser.add_argument(
        "--load_device",
        metavar="GPU",
        help="TensorRT engines: NVML index or UUID of the GPU they run on, 0 when left out; its clock is kept",
    )
    parser.add_argument("--quick", action="store_true", help="one context depth and fewer lengths")
    parser.add_argument(
        "--plot", type=Path, metavar="F.png", help="also draw the times; .svg, or .png with the extra 'plot'"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write `cost_table.json` and print what was found."""
    if args.plot is not None:
        check_plot(args.plot)
    directory = open_engine_dir(args.engine_dir)
    stored = measure_and_store(
        directory,
        num_threads=args.num_threads,
        quick=args.quick,
        kernel_library=args.kernel_library,
        load_device=args.load_device,
    )
    rows = [("cost table", str(directory.path / "cost_table.json"))]
    clock = "" if stored.sm_clock_mhz is None else f", SM clock {stored.sm_clock_mhz} MHz"
    rows.append(("device", f"{stored.device}, {stored.num_threads} threads{clock}"))
    rows.append(("timed", "whole rounds on the device" if stored.device_rounds else "pass by pass"))
    print_table([*rows, *_rows(stored.table)])
    if args.plot is not None:
        write_plot(args.plot, stored.table)
    return 0


def measure_and_store(
    directory: EngineDirectory,
    *,
    num_threads: int,
    quick: bool,
    kernel_library: Path | None = None,
    load_device: str | None = None,
) -> StoredCostTable:
    """Measure an engine of its own and write `cost_table.json`.

    Raises:
        ConfigError: the times are flat or inverted; nothing is written.
        UsageError: a GPU is named for an engine that runs on none.
        DeviceError: the file cannot be written.
    """
    manifest = directory.manifest
    reader = None
    if manifest.backend != "onnxruntime":
        device = load_device or "0"
        reader = NvmlReader(int(device) if device.isdecimal() else device)
    elif load_device is not None:
        raise UsageError("--load_device names a GPU, and this engine runs on a CPU; leave it out")
    engine = load_engine(directory.path, num_threads=num_threads, verify_hashes=False, kernel_library=kernel_library)
    try:
        if reader is not None:
            reader.read()  # opens the library: behind the passes that would take until the GPU is idle
        table = _measure(engine, quick=quick)
        device_rounds = device_timer(engine) is not None
        clock = None if reader is None else _sm_clock(reader)
    finally:
        engine.close()
        if reader is not None:
            reader.close()
    check_cost_table(table)
    name = device_name(manifest.backend, manifest.gpu_architectures)
    stored = StoredCostTable(make_monotone(table), name, num_threads, sm_clock_mhz=clock, device_rounds=device_rounds)
    write_cost_table(directory, stored)
    return stored


def _sm_clock(reader: NvmlReader) -> int | None:
    """Return the clock right behind the passes; None where the GPU was idle by then, or does not tell whether it was.

    A server judges clocks against this one; that of an idle GPU would hide every throttling.
    """
    sample = reader.read()
    if sample.failure is not None:
        reason = sample.message
    elif sample.sm_clock_mhz is None:
        reason = "the driver does not tell it"
    elif sample.idle or (sample.throttle_reasons is None and not sample.sm_utilization):
        reason = "the GPU was idle, or is another one than --load_device names"
    else:
        return sample.sm_clock_mhz
    logger.warning("the table keeps no SM clock (%s); servers will judge clocks by the GPU's maximum", reason)
    return None


def _measure(engine: Engine, *, quick: bool) -> CostTable:
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        table = measure_cost_table(
            engine, quick=quick, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    # Rounds that stay on the device draft there.
    make = None if device_timer(engine) is not None else own_proposer(engine.limits)
    return table if make is None else make(engine, "rejection", PassTimer(SessionStats(0))).costs(table)


def _rows(table: CostTable) -> list[tuple[str, str]]:
    """Return one row a number of requests and depth: draft time, and verify time of one token to a whole block each."""
    rows = []
    for count, depth in sorted({(shape.num_requests, shape.depth) for shape in table.verify_us}):
        times = {s.num_tokens: us for s, us in table.verify_us.items() if (s.num_requests, s.depth) == (count, depth)}
        verify = ", ".join(f"{tokens} {us / 1e3:.1f}" for tokens, us in sorted(times.items()))
        draft = f"; draft {table.draft_time_us(count, depth=depth) / 1e3:.1f} ms" if table.draft_us else ""
        rows.append((f"{count} requests, {depth} cached", f"verify tokens and ms: {verify}{draft}"))
    return rows
