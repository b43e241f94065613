"""The page of a load report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtllm_dspark.reports.html import Page
from trtllm_dspark.reports.svg import COLOURS, Series, line_plot
from trtllm_dspark.simulate.load_report import LoadReport, Row, versions
from trtllm_dspark.simulate.pareto import frontier

_COLUMNS = (
    ("tokens/s", "tokens_per_s"),
    ("tokens/s and user", "user_tokens_per_s"),
    ("5 %", "user_tokens_per_s_p5"),
    ("50 %", "user_tokens_per_s_p50"),
    ("95 %", "user_tokens_per_s_p95"),
    ("first token ms", "ttft_ms_p50"),
    ("95 %", "ttft_ms_p95"),
    ("drafts verified a request and round", "verify_budget"),
    ("accepted length", "accepted_len"),
    ("wasted", "wasted_share"),
    ("decoding at once", "concurrency"),
    ("requests", "requests"),
    ("failed", "failed"),
)


def load_page(report: LoadReport) -> str:
    """Return a report as one HTML page."""
    page = Page(report.title)
    if report.estimated:
        page.note("Estimated: pass times come from public figures of the GPU and assumptions, not from a measurement.")
    for note in report.notes:
        page.note(note)
    page.text(report.advice())
    page.table(("what", "value"), report.facts)
    if report.rows:
        page.figure(frontier_plot(report), "Up and to the right is better; each point is a load.")
        for svg in load_plots(report):
            page.figure(svg)
    for name, seconds, values in report.timelines:
        steps = [Series("", list(seconds), list(values), style="steps")]
        page.figure(line_plot(steps, title=name, x_label="seconds", y_label=name, height=260))
    _tables(page, report)
    page.heading("How this was made")
    page.code(report.command)
    page.text(", ".join(f"{name} {version}" for name, version in versions().items()))
    return str(page)


def frontier_plot(report: LoadReport) -> str:
    """Return throughput over the speed of a user, one curve a policy."""
    series = []
    for index, (name, rows) in enumerate(report.curves.items()):
        measured = rows[0].measured
        series.append(
            Series(
                name,
                [row.point.speed for row in rows],
                [row.point.throughput for row in rows],
                colour=_colour(report, name, index),
                dash=1 if measured else 0,
                notes=_ends(rows),
            )
        )
    if report.service is not None:
        top = max(row.point.throughput for row in report.rows)
        speed = report.service.speed
        series.append(Series(f"{speed:g} tokens/s", [speed, speed], [0, top], style="line", colour="#999", dash=2))
    return line_plot(
        series, title="Throughput and speed", x_label="tokens/s a user sees", y_label="tokens/s of the server"
    )


def load_plots(report: LoadReport) -> list[str]:
    """Return plots over load: throughput, verify budget, first token; empty where there are no two loads."""
    loads = list(dict.fromkeys(row.load for row in report.rows))
    if len(loads) < 2:
        return []
    users = all(row.users for row in report.rows)
    plots = [("Throughput over load", "tokens/s", "tokens_per_s"), ("Verify budget over load", "drafts a request and "
             "round", "verify_budget"), ("Wasted verification over load", "share of verified drafts", "wasted_share"),
             ("Time to first token over load", "ms, median", "ttft_ms_p50")]  # fmt: skip
    place: Callable[[Row], float] = lambda row: float(row.users or 0) if users else float(loads.index(row.load) + 1)  # noqa: E731
    figures = []
    for title, y_label, key in plots:
        series = [
            Series(
                name,
                [place(row) for row in rows],
                [_number(row.figures.get(key)) for row in rows],
                colour=_colour(report, name, index),
                dash=1 if rows[0].measured else 0,
            )
            for index, (name, rows) in enumerate(report.curves.items())
            if any(row.figures.get(key) is not None for row in rows)
        ]
        x_label = "users at once" if users else "load, in the order of the tables"
        if series:
            figures.append(line_plot(series, title=title, x_label=x_label, y_label=y_label, x_log=users, height=320))
    return figures


def _tables(page: Page, report: LoadReport) -> None:
    if report.service is not None:
        page.heading(f"At {report.service.speed:g} tokens/s per user")
        page.table(("policy", "tokens/s of the server"), list(report.at_service().items()))
    best = frontier([row.point for row in report.rows])
    page.heading("Frontier")
    page.text("Loads and policies that no other beats in both speed and throughput.")
    rows = [report.rows[index] for index in best]
    page.table(
        ("policy", "load", "tokens/s and user", "tokens/s"),
        [(row.curve, row.load, row.point.speed, row.point.throughput) for row in rows],
    )
    for name, curve in report.curves.items():
        page.heading(name)
        page.table(
            ("load", *(column for column, _ in _COLUMNS)),
            [(row.load, *(row.figures.get(key) for _, key in _COLUMNS)) for row in curve],
        )


def _colour(report: LoadReport, name: str, index: int) -> str:
    """Give a measured curve the colour of the simulated one of its policy."""
    names = list(report.curves)
    simulated = name.removesuffix(", measured")
    return COLOURS[(names.index(simulated) if simulated in names else index) % len(COLOURS)]


def _ends(rows: Sequence[Row]) -> list[str]:
    """Name the first and the last load of a curve."""
    texts = [f"{row.users}" if row.users else row.load.split(" ")[0] for row in rows]
    return [text if index in (0, len(rows) - 1) else "" for index, text in enumerate(texts)]


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
