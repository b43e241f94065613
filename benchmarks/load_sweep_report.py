"""What the runs of load_sweep.py say: medians, paired ratios, bootstrap intervals, tables and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.reports import Series, line_plot

RESAMPLES = 2000
CONFIDENCE = 0.95
MIN_REPEATS = 3
"""An interval over fewer says nothing."""
SUMMED = ("seconds", "cpu_seconds", "tokens", "whole_seconds", "whole_tokens", "verify_rounds", "emitted")
Run = dict[str, Any]
Group = tuple[int, str, int]


def write(runs: list[Run], facts: dict[str, Any], folder: Path) -> str:
    """Write sweep.json, sweep.md and sweep.svg into `folder` and return the tables."""
    content = summarise(runs) | {"facts": facts}
    text = tables(content)
    (folder / "sweep.json").write_text(json.dumps(content | {"runs": runs}, indent=1) + "\n", encoding="utf-8")
    (folder / "sweep.md").write_text(text, encoding="utf-8")
    (folder / "sweep.svg").write_text(plot(content), encoding="utf-8")
    return text


def summarise(runs: list[Run]) -> dict[str, Any]:
    """Return `cells` over all domains, `domain_cells`, `ablation` without calibration, and `verdicts`."""
    calibrated = [run for run in runs if run["calibrated"]]
    domains = sorted({run["domain"] for run in runs})
    levels = sorted({run["concurrency"] for run in runs})
    names = list(dict.fromkeys(run["speculation"] for run in calibrated))
    off = {_group(run): run for run in calibrated if run["speculation"] == "off"}
    domain_cells, cells = [], []
    for level in levels:
        for name in names:
            pooled = []
            for domain in domains:
                mine = _select(calibrated, name, level, domain)
                pooled.append(mine)
                if mine:
                    domain_cells.append({"domain": domain, **_cell(name, level, mine, off)})
            whole = _pooled(pooled)
            if whole:
                cells.append(_cell(name, level, whole, _pooled_off(off, level, domains)))
    ablation = []
    for name in dict.fromkeys(run["speculation"] for run in runs if not run["calibrated"]):
        without = [run for run in runs if not run["calibrated"]]
        for level in levels:
            base = {_group(run): run for run in _select(calibrated, name, level, None)}
            mine = _select(without, name, level, None)
            if mine:
                ablation.append(_cell(name, level, mine, base))
    return {
        "cells": cells,
        "domain_cells": domain_cells,
        "ablation": ablation,
        "verdicts": _verdicts(calibrated, names, levels, domains),
    }


def tables(content: dict[str, Any]) -> str:
    """Return everything as Markdown."""
    facts = content["facts"]
    lines = [
        f"{facts['device']}, {facts['num_threads']} threads, {facts['max_tokens']} tokens a request, greedy, "
        f"{facts['prompts_file']}, {facts['date']}.",
        f"Rates over `off` of the same repeat: median and {CONFIDENCE:.0%} bootstrap interval over the repeats, "
        "the same by processor time, and the accepted length.",
        "",
    ]
    levels = sorted({cell["concurrency"] for cell in content["domain_cells"]})
    for domain in [*sorted({cell["domain"] for cell in content["domain_cells"]}), None]:
        chosen = content["cells"] if domain is None else content["domain_cells"]
        chosen = [cell for cell in chosen if domain is None or cell["domain"] == domain]
        names = list(dict.fromkeys(cell["speculation"] for cell in chosen))
        lines += [f"| {domain or 'all domains'} | " + " | ".join(f"{level} at once" for level in levels) + " |"]
        lines += ["|---|" + "---|" * len(levels)]
        for name in names:
            row = {cell["concurrency"]: cell for cell in chosen if cell["speculation"] == name}
            lines.append(f"| `{name}` | " + " | ".join(_entry(row.get(level)) for level in levels) + " |")
        lines.append("")
    if content["ablation"]:
        lines += ["| without calibration, over the same with | " + " | ".join(map(str, levels)) + " |"]
        lines += ["|---|" + "---|" * len(levels)]
        for name in dict.fromkeys(cell["speculation"] for cell in content["ablation"]):
            row = {cell["concurrency"]: cell for cell in content["ablation"] if cell["speculation"] == name}
            lines.append(f"| `{name}` | " + " | ".join(_ratio(row.get(level)) for level in levels) + " |")
        lines.append("")
    lines += [f"* {verdict}" for verdict in content["verdicts"]["sentences"]]
    return "\n".join(lines) + "\n"


def plot(content: dict[str, Any]) -> str:
    """Return the rates over `off` by concurrency, all domains, as SVG."""
    shown = [name for name in dict.fromkeys(cell["speculation"] for cell in content["cells"]) if name != "off"]
    series = []
    for name in shown:
        row = sorted((cell for cell in content["cells"] if cell["speculation"] == name), key=lambda c: c["concurrency"])
        adaptive = name == "adaptive"
        series.append(
            Series(
                name,
                [cell["concurrency"] for cell in row],
                [cell["ratio_to_off"] for cell in row],
                low=[cell["ratio_interval"][0] for cell in row] if adaptive else None,
                high=[cell["ratio_interval"][1] for cell in row] if adaptive else None,
                dash=0 if adaptive else 1,
            )
        )
    level = sorted({cell["concurrency"] for cell in content["domain_cells"]})
    series.append(Series("off", [level[0], level[-1]], [1.0, 1.0], style="line", colour="#000"))
    return line_plot(
        series, title="Rate over off", x_label="requests at once", y_label="ratio", x_log=True, from_zero=False
    )


def _cell(name: str, level: int, runs: Sequence[Run], base: dict[Group, Run]) -> dict[str, Any]:
    """Return one cell from its runs, one a repeat (and domain)."""
    rates = np.array([run["tokens"] / run["seconds"] for run in runs])
    ratios = np.array([run["tokens"] / run["seconds"] / _rate(base[_group(run)]) for run in runs])
    verified = np.sum([run["verified_per_position"] for run in runs], axis=0)
    accepted = np.sum([run["accepted_per_position"] for run in runs], axis=0)
    rounds = sum(run["verify_rounds"] for run in runs)
    plans: dict[str, int] = {}
    for run in runs:
        for reason, count in run["plans"].items():
            plans[reason] = plans.get(reason, 0) + count
    low, high = _interval(rates)
    whole = np.array([run["whole_tokens"] / run["whole_seconds"] for run in runs])
    return {
        "speculation": name,
        "concurrency": level,
        "repeats": len(runs),
        "tokens_per_s": float(np.median(rates)),
        "low": low,
        "high": high,
        "interval": [low, high],
        "whole_tokens_per_s": float(np.median(whole)),
        "whole_interval": list(_interval(whole)),
        "ratio_to_off": float(np.median(ratios)),
        "ratio_interval": list(_interval(ratios)),
        "cpu_ratio_to_off": float(np.median([_cpu_rate(run) / _cpu_rate(base[_group(run)]) for run in runs])),
        "accepted_len": sum(run["emitted"] for run in runs) / rounds if rounds else None,
        "verify_len": float(verified.sum()) / rounds if rounds else 0.0,
        "acceptance_per_position": [float(a / v) if v else None for a, v in zip(accepted, verified, strict=True)],
        "verified_per_position": [int(value) for value in verified],
        "round_ms": statistics.median(run["round_ms"] for run in runs),
        "engine_ms": statistics.median(run["engine_ms"] for run in runs),
        "plans": plans,
    }


def _verdicts(runs: list[Run], names: list[str], levels: list[int], domains: list[str]) -> dict[str, Any]:
    """Return what the sweep was made to decide."""
    if "adaptive" not in names or "off" not in names:
        return {"sentences": ["no verdicts without `adaptive` and `off`"]}
    fixed = [name for name in names if name.startswith("fixed")]
    below_off, below_fixed, cells = [], [], 0
    measured = {(run["concurrency"], run["domain"]) for run in runs}
    for level in levels:
        for domain in domains:
            if (level, domain) not in measured:
                continue
            cells += 1
            place = f"{domain} at {level}"
            ratio = np.median(_ratios(runs, "adaptive", "off", level, domain))
            if ratio < 0.97:
                below_off.append(f"{place}: {ratio:.3f}")
            for name in fixed:
                paired = _ratios(runs, "adaptive", name, level, domain)
                if len(paired) >= MIN_REPEATS and _interval(paired)[1] < 1:
                    below_fixed.append(f"{place}: {np.median(paired):.3f} of {name}")
    overall = {
        name: float(np.exp(np.mean([np.log(np.median(_ratios(runs, name, "off", level, domain)))
                                    for level, domain in sorted(measured)])))
        for name in names
    }  # fmt: skip
    best = max(fixed, key=lambda name: overall[name]) if fixed else None
    sentences = [
        f"`adaptive` is at least 0.97 of `off` in {cells - len(below_off)} of {cells} cells"
        + (f"; below: {', '.join(below_off)}" if below_off else ""),
        f"separably below a fixed length (upper end of the paired interval below 1, at least {MIN_REPEATS} repeats) in "
        f"{len(below_fixed)} comparisons" + (f": {', '.join(below_fixed)}" if below_fixed else ""),
        "geometric mean over all cells, over `off`: "
        + ", ".join(f"`{name}` {value:.3f}" for name, value in overall.items() if name != "off"),
    ]
    return {
        "below_off": below_off,
        "below_fixed": below_fixed,
        "overall": overall,
        "best_fixed": best,
        "sentences": sentences,
    }


def _ratios(runs: list[Run], name: str, other: str, level: int, domain: str) -> np.ndarray:
    base = {_group(run): _rate(run) for run in _select(runs, other, level, domain)}
    return np.array([_rate(run) / base[_group(run)] for run in _select(runs, name, level, domain)])


def _interval(values: np.ndarray, statistic: Callable[..., Any] = np.median) -> tuple[float, float]:
    """Return the bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    picked = rng.integers(0, len(values), (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(statistic(values[picked], axis=1), [tail, 1 - tail])
    return float(low), float(high)


def _select(runs: list[Run], name: str, level: int, domain: str | None) -> list[Run]:
    return [
        run
        for run in runs
        if run["speculation"] == name and run["concurrency"] == level and domain in (None, run["domain"])
    ]


def _pooled(by_domain: list[list[Run]]) -> list[Run]:
    """Return one run a repeat over all domains, of the repeats that every domain has."""
    pooled = []
    for repeat in sorted(set.intersection(*({run["repeat"] for run in runs} for runs in by_domain))):
        parts = [run for runs in by_domain for run in runs if run["repeat"] == repeat]
        plans: dict[str, int] = {}
        for part in parts:
            for reason, count in part["plans"].items():
                plans[reason] = plans.get(reason, 0) + count
        rounds = sum(part["rounds"] for part in parts)
        pooled.append(
            {
                **parts[0],
                "domain": "all",
                **{key: sum(part[key] for part in parts) for key in SUMMED},
                **{
                    key: np.sum([part[key] for part in parts], axis=0).tolist()
                    for key in ("verified_per_position", "accepted_per_position")
                },
                **{key: sum(p[key] * p["rounds"] for p in parts) / rounds for key in ("round_ms", "engine_ms")},
                "rounds": rounds,
                "plans": plans,
            }
        )
    return pooled


def _pooled_off(off: dict[Group, Run], level: int, domains: list[str]) -> dict[Group, Run]:
    runs = _pooled([[run for key, run in off.items() if key[1:] == (domain, level)] for domain in domains])
    return {_group(run): run for run in runs}


def _group(run: Run) -> Group:
    return run["repeat"], run["domain"], run["concurrency"]


def _rate(run: Run) -> float:
    return float(run["tokens"] / run["seconds"])


def _cpu_rate(run: Run) -> float:
    return float(run["tokens"] / run["cpu_seconds"])


def _entry(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not measured"
    if cell["speculation"] == "off":
        return f"{cell['tokens_per_s']:.0f} tokens/s"
    accepted = "" if cell["accepted_len"] is None else f", {cell['accepted_len']:.2f}"
    return f"{_ratio(cell)}{accepted}"


def _ratio(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not measured"
    low, high = cell["ratio_interval"]
    return f"{cell['ratio_to_off']:.2f} [{low:.2f}, {high:.2f}], {cell['cpu_ratio_to_off']:.2f}"
