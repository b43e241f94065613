"""What a run of a server under load says: rows, frontier, service level, one sentence of advice."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from trtllm_dspark import __version__
from trtllm_dspark.errors import ConfigError, UsageError
from trtllm_dspark.simulate.pareto import Point, frontier, throughput_at
from trtllm_dspark.simulate.records import Summary

SCHEMA = "trtllm_dspark.load_report"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One policy under one load.

    Attributes:
        policy: its name.
        load: in words.
        users: users of a closed loop, or None.
        measured: whether it was measured, not simulated.
        figures: as `Summary.as_json` names them.
    """

    policy: str
    load: str
    users: int | None
    measured: bool
    figures: Mapping[str, Any]

    @staticmethod
    def of(policy: str, load: str, users: int | None, summary: Summary, *, measured: bool) -> Row:
        """Return the row of a summary."""
        return Row(policy, load, users, measured, summary.as_json())

    @property
    def point(self) -> Point:
        """Speed of a user and throughput."""
        return Point(float(self.figures["user_tokens_per_s"]), float(self.figures["tokens_per_s"]))

    @property
    def curve(self) -> str:
        """Name of the curve it lies on."""
        return f"{self.policy}, measured" if self.measured else self.policy

    def as_json(self) -> dict[str, Any]:
        """Return the row as one flat object."""
        return {
            "policy": self.policy,
            "load": self.load,
            "users": self.users,
            "measured": self.measured,
            **self.figures,
        }


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What users must get.

    Attributes:
        speed: tokens a second and user at least.
    """

    speed: float

    @staticmethod
    def parse(text: str) -> ServiceLevel:
        """Read `tok_s_user=80`.

        Raises:
            ConfigError: another form.
        """
        name, _, value = text.partition("=")
        try:
            if name.strip() == "tok_s_user" and 0 < float(value) < float("inf"):
                return ServiceLevel(float(value))
        except ValueError:
            pass
        raise ConfigError(f"--sla '{text}' is not known; use tok_s_user=NUMBER")


@dataclass(frozen=True)
class LoadReport:
    """Everything a report shows.

    Attributes:
        title: of the page.
        command: the exact command.
        facts: (name, text) of what was simulated or measured: server, acceptance, load.
        rows: by policy, loads rising.
        estimated: whether times were estimated from public figures.
        service: what users must get, or None.
        timelines: (name, seconds, values) of a cluster: replicas, requests that wait.
    """

    title: str
    command: str
    facts: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    estimated: bool = False
    service: ServiceLevel | None = None
    notes: Sequence[str] = ()
    timelines: Sequence[tuple[str, Sequence[float], Sequence[float]]] = field(default=(), repr=False)

    @property
    def curves(self) -> dict[str, list[Row]]:
        """Rows by curve, in the order in which they appear."""
        curves: dict[str, list[Row]] = {}
        for row in self.rows:
            curves.setdefault(row.curve, []).append(row)
        return curves

    def at_service(self) -> dict[str, float | None]:
        """Return the throughput of each curve at the service level; None where it is not reached."""
        if self.service is None:
            return {}
        speed = self.service.speed
        return {name: throughput_at([row.point for row in rows], speed) for name, rows in self.curves.items()}

    def advice(self) -> str:
        """Return one sentence."""
        if not self.rows:
            return "Nothing ran."
        if self.service is not None:
            return self._service_advice(self.service.speed)
        best: dict[str, int] = {}
        for load in dict.fromkeys(row.load for row in self.rows):
            rows = [row for row in self.rows if row.load == load]
            winner = max(rows, key=lambda row: row.point.throughput)
            best[winner.curve] = best.get(winner.curve, 0) + 1
        name, count = max(best.items(), key=lambda entry: entry[1])
        loads = len({row.load for row in self.rows})
        return f"Use {name}: it has the highest throughput in {count} of {loads} loads."

    def _service_advice(self, speed: float) -> str:
        reached = {name: value for name, value in self.at_service().items() if value is not None}
        if not reached:
            fastest = max(self.rows, key=lambda row: row.point.speed)
            return (
                f"No policy gives every user {speed:g} tokens/s here; {fastest.curve} comes nearest with "
                f"{fastest.point.speed:.0f} at {fastest.load}."
            )
        ranked = sorted(reached.items(), key=lambda entry: -entry[1])
        name, most = ranked[0]
        text = f"At {speed:g} tokens/s per user use {name}: it carries {most:,.0f} tokens/s"
        if len(ranked) > 1:
            second, other = ranked[1]
            text += f", {100 * (most / other - 1):.0f} % more than {second}" if other > 0 else ""
        missing = [curve for curve in self.curves if curve not in reached]
        return text + (f"; {', '.join(missing)} cannot reach that speed." if missing else ".")

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON (docs/file_formats.md)."""
        points = [row.point for row in self.rows]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "title": self.title,
            "command": self.command,
            "versions": versions(),
            "estimated": self.estimated,
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "rows": [row.as_json() for row in self.rows],
            "frontier": [
                {"policy": self.rows[index].curve, "load": self.rows[index].load} for index in frontier(points)
            ],
            "service_level": None if self.service is None else {"tok_s_user": self.service.speed},
            "throughput_at_service_level": self.at_service(),
            "advice": self.advice(),
        }


def versions() -> dict[str, str]:
    """Return what made a report."""
    return {"trtllm_dspark": __version__, "python": platform.python_version(), "numpy": numpy.__version__}


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a report written as JSON.

    Raises:
        UsageError: the file cannot be read or is no report.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["schema"] != SCHEMA or raw["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"it is not of schema {SCHEMA} version {SCHEMA_VERSION}")
        keys = ("policy", "load", "users", "measured")
        return [
            Row(**{key: row[key] for key in keys}, figures={k: v for k, v in row.items() if k not in keys})
            for row in raw["rows"]
        ]
    except OSError as error:
        raise UsageError(f"report {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"report {path} cannot be used ({error}); write one with bench --report F.json") from error
