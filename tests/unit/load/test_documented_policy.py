"""docs/load.md says what the code does: numbers, names, and every decision on every trace."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.nvml_stub import TRACES, NvmlStub

from trtllm_dspark.load import REASONS, LoadMonitor, PolicyConfig, metric_names
from trtllm_dspark.load._faults import FATAL_XIDS

DOC = (Path(__file__).parents[3] / "docs" / "load.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Return the rows of the first table below a heading, without its two head lines."""
    section = DOC.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def documented_decisions() -> dict[tuple[str, str], list[list[str]]]:
    decisions: dict[tuple[str, str], list[list[str]]] = {}
    for trace, device, *row in table("Decisions on traces"):
        decisions.setdefault((trace, device), []).append(row)
    return decisions


def holds(row: list[str], state: dict[str, Any]) -> bool:
    numbers = (state["compute_scale"], state["budget_scale"], state["admission_scale"])
    near = all(abs(float(cell) - number) < 1e-3 for cell, number in zip(row[1:4], numbers, strict=True))
    return near and re.findall(r"`(\w+)`", row[4]) == state["reasons"]


def test_numbers_are_the_defaults() -> None:
    assert {name.strip("`"): float(value) for name, value in table("Numbers")} == asdict(PolicyConfig())


def test_policy_names_every_reason_and_fatal_xid() -> None:
    text = "\n".join("|".join(row) for row in table("Policy"))
    assert set(re.findall(r"`(\w+)`", text)) >= set(REASONS)
    assert {int(n) for n in re.findall(r"\d+", re.search(r"Xid (48[^|]*)", text)[1])} == FATAL_XIDS  # type: ignore[index]


def test_metrics_table_names_every_metric() -> None:
    names = {name for row in table("Metrics") for name in re.findall(r"`(\w+)`", row[0])}
    counters = {name for name in LoadMonitor().metrics() if name not in metric_names()}
    assert names == {*metric_names(), *counters}


def test_every_trace_is_documented() -> None:
    assert {trace for trace, _ in documented_decisions()} == {path.stem for path in TRACES.glob("*.trace")}


@pytest.mark.parametrize(("trace", "device"), sorted(documented_decisions()))
def test_replayed_trace_gives_the_documented_decisions(nvml_stub: NvmlStub, trace: str, device: str) -> None:
    rows = documented_decisions()[trace, device]
    states = [entry["state"] for entry in nvml_stub.replay(trace, device)]
    starts = [int(row[0]) for row in rows]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] < len(states)
    wrong = [
        (index, row, states[index])
        for row, first, last in zip(rows, starts, [*starts[1:], len(states)], strict=True)
        for index in range(first, last)
        if not holds(row, states[index])
    ]
    assert wrong[:3] == []


def test_flapping_trace_moves_one_way_until_it_is_calm(nvml_stub: NvmlStub) -> None:
    scales = [entry["state"]["compute_scale"] for entry in nvml_stub.replay("flapping")]
    calm = 155
    assert scales[:calm] == sorted(scales[:calm])
    assert scales[calm - 1] > 1.0
    assert scales[-1] == 1.0


def test_memory_pressure_trace_closes_admission_before_memory_is_gone(nvml_stub: NvmlStub) -> None:
    entries = nvml_stub.replay("memory_pressure")
    closed = next(entry for entry in entries if entry["state"]["admission_scale"] == 0)
    least = min(entry["sample"]["memory_free_bytes"] for entry in entries)
    assert closed["sample"]["memory_free_bytes"] > 5 * least
