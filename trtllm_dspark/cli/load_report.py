"""`trtllm-dspark load_report`: print what the load of the GPU would change in a round now."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from trtllm_dspark.cli._tables import format_size, print_table
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.load import LoadPolicy, LoadState, NvmlReader, Sample, load_metrics
from trtllm_dspark.load.monitor import INTERVAL_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--device", default="0", help="number of the GPU as nvidia-smi counts, or a GPU's or MIG UUID")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to watch before deciding")
    parser.add_argument(
        "--pid", type=int, nargs="*", default=[], help="processes that count as ours; without it every one is another's"
    )
    parser.add_argument(
        "--reference_sm_clock_mhz",
        type=int,
        help="SM clock the cost table was measured at; without it the device's maximum",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Watch the device and print what was seen and decided."""
    if not args.seconds > 0:
        raise ConfigError(f"--seconds {args.seconds} must be positive")
    if args.reference_sm_clock_mhz is not None and args.reference_sm_clock_mhz <= 0:
        raise ConfigError(f"--reference_sm_clock_mhz {args.reference_sm_clock_mhz} must be positive")
    device = int(args.device) if args.device.isdecimal() else args.device
    reader = NvmlReader(device, own_pids=args.pid, own_memory_bytes=_none_of_ours)
    policy = LoadPolicy(reference_sm_clock_mhz=args.reference_sm_clock_mhz)
    try:
        sample, state = _watch(reader, policy, args.seconds)
    finally:
        reader.close()
    if args.json:
        print(json.dumps(_report(args.device, sample, state), indent=2))
    else:
        print_table(_rows(args.device, sample, state))
    return 0


def _none_of_ours() -> int:
    """Say that what no listed process of ours holds is not ours: this command allocates nothing."""
    return 0


def _watch(reader: NvmlReader, policy: LoadPolicy, seconds: float) -> tuple[Sample, LoadState]:
    end = time.monotonic() + seconds
    while True:
        sample = reader.read()
        state = policy.update(sample)
        # Without a device there is nothing to wait for.
        if sample.failure is not None or time.monotonic() >= end:
            return sample, state
        time.sleep(INTERVAL_S)


def _report(device: str, sample: Sample, state: LoadState) -> dict[str, object]:
    return {
        "device": device,
        "failure": sample.failure,
        "message": sample.message,
        "state": asdict(state),
        "metrics": load_metrics(sample, state),
    }


def _rows(device: str, sample: Sample, state: LoadState) -> list[tuple[str, str]]:
    rows = [("device", device)]
    if sample.failure is not None:
        rows.append(("not readable", sample.message))
    else:
        rows += _input_rows(sample)
    return [
        *rows,
        ("compute-bound time", f"x {state.compute_scale:.2f}"),
        ("verify budget", f"{state.budget_scale:.0%}"),
        ("admission", "closed" if state.admission_closed else f"up to {state.admission_scale:.0%} of the slots"),
        ("reasons", ", ".join(state.reasons) or "none"),
    ]


def _input_rows(sample: Sample) -> list[tuple[str, str]]:
    return [
        ("SM utilization", _text(sample.sm_utilization, "{:.0%}")),
        ("memory utilization", _text(sample.memory_utilization, "{:.0%}")),
        ("free memory", _pair(_size(sample.memory_free_bytes), _size(sample.memory_total_bytes))),
        ("memory of others", _size(sample.others_memory_bytes)),
        ("processes of others", _text(sample.num_others, "{}")),
        ("SM use of others", _text(sample.others_sm_utilization, "{:.0%}")),
        ("SM clock", _pair(_text(sample.sm_clock_mhz, "{} MHz"), _text(sample.sm_clock_max_mhz, "{} MHz"))),
        ("power", _pair(_text(sample.power_watts, "{:.0f} W"), _text(sample.power_limit_watts, "{:.0f} W"))),
        ("temperature", _text(sample.temperature_celsius, "{} C")),
        ("slows down at", _text(sample.temperature_slowdown_celsius, "{} C")),
        ("throttle reasons", _text(sample.throttle_reasons, "{:#x}")),
        ("ECC errors, uncorrected", _text(sample.ecc_uncorrected, "{}")),
        ("ECC errors, corrected", _text(sample.ecc_corrected, "{}")),
        ("MIG", sample.mig),
    ]


def _text(value: float | None, form: str) -> str:
    return "not told" if value is None else form.format(value)


def _size(value: int | None) -> str:
    return "not told" if value is None else format_size(value)


def _pair(left: str, right: str) -> str:
    return left if left == right == "not told" else f"{left} of {right}"
