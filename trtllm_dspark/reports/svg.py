"""Line plots as SVG text: several series, bands, marks, linear and logarithmic axes, a legend."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from trtllm_dspark.reports.axis import Axis, fit_axis, format_tick

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b5b5b", "#8c6d1f")
"""Told apart with any colour vision (Okabe and Ito)."""
DASHES = ("", "7 4", "2 3", "9 3 2 3")
FONT = "font-family='system-ui,Helvetica,Arial,sans-serif'"
INK, GRID = "#222", "#e3e3e3"
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 18, 36, 48
_LEGEND_LINE = 19

Style = Literal["line", "points", "both", "steps"]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot. Points whose x or y has no place on the axes leave a gap.

    Attributes:
        label: its name in the legend; empty leaves it out of the legend.
        x: [n] values.
        y: [n] values.
        low: [n] lower edge of a band around it, or None.
        high: [n] upper edge of the band, or None.
        style: a line, points, both, or steps that hold until the next x.
        colour: an SVG colour; None = the next of the palette.
        dash: 0 = a whole line, 1 to 3 = dashes.
        notes: [n] text shown beside each point, or None.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: Style = "both"
    colour: str | None = None
    dash: int = 0
    notes: Sequence[str] | None = None


def line_plot(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    x_limits: tuple[float, float] | None = None,
    y_limits: tuple[float, float] | None = None,
    from_zero: bool = True,
    width: int = 640,
    height: int = 400,
) -> str:
    """Return an `<svg>` element; written to a file as it is, it is an SVG image.

    Args:
        series: what to draw, the first lowest.
        title: above the plot, and what a screen reader says.
        x_label: below the x axis.
        y_label: beside the y axis.
        x_log: logarithmic x axis.
        y_log: logarithmic y axis.
        x_limits: range of the x axis; None = of the values.
        y_limits: range of the y axis; None = of the values.
        from_zero: let a linear y axis start at 0 when no value is negative.
        width: of the plot in pixels; it scales with the page.
        height: of the plot in pixels, the legend below it not counted.
    """
    names = [entry.label for entry in series if entry.label]
    rows = _legend_rows(names, width)
    left, right, top, bottom = _LEFT, width - _RIGHT, _TOP, height - _BOTTOM
    x_axis = fit_axis((v for s in series for v in s.x), start=left, end=right, log=x_log, limits=x_limits)
    y_axis = fit_axis(_heights(series), start=bottom, end=top, log=y_log, limits=y_limits, from_zero=from_zero)
    colours = [entry.colour or COLOURS[index % len(COLOURS)] for index, entry in enumerate(series)]
    total = height + _LEGEND_LINE * len(rows)
    clip = f"clip-{zlib.crc32(repr((title, names, width, height)).encode()):08x}"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {total}' role='img' {FONT} font-size='12' "
        f"style='max-width:100%;height:auto' width='{width}'>",
        f"<title>{escape(title)}</title><rect width='{width}' height='{total}' fill='#fff'/>",
        f"<clipPath id='{clip}'><rect x='{left}' y='{top}' width='{right - left}' height='{bottom - top}'/></clipPath>",
        f"<text x='{left}' y='22' font-size='14' font-weight='600' fill='{INK}'>{escape(title)}</text>",
        *_frame(x_axis, y_axis, x_label, y_label),
        f"<g clip-path='url(#{clip})'>",
        *(_band(entry, colour, x_axis, y_axis) for entry, colour in zip(series, colours, strict=True)),
        *(_line(entry, colour, x_axis, y_axis) for entry, colour in zip(series, colours, strict=True)),
        "</g>",
        *(_notes(entry, x_axis, y_axis) for entry in series),
        *_legend(series, colours, rows, height),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _heights(series: Iterable[Series]) -> Iterable[float]:
    for entry in series:
        yield from entry.y
        yield from entry.low or ()
        yield from entry.high or ()


def _frame(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str) -> Iterable[str]:
    left, right, top, bottom = x_axis.start, x_axis.end, y_axis.end, y_axis.start
    for tick in y_axis.ticks():
        y = y_axis.pixel(tick)
        yield f"<path d='M{left} {y:.1f}H{right}' stroke='{GRID}'/>"
        yield f"<text x='{left - 7}' y='{y + 4:.1f}' text-anchor='end' fill='{INK}'>{format_tick(tick)}</text>"
    for tick in x_axis.ticks():
        x = x_axis.pixel(tick)
        yield f"<path d='M{x:.1f} {top}V{bottom}' stroke='{GRID}'/>"
        yield f"<text x='{x:.1f}' y='{bottom + 17}' text-anchor='middle' fill='{INK}'>{format_tick(tick)}</text>"
    yield f"<path d='M{left} {top}V{bottom}H{right}' fill='none' stroke='{INK}'/>"
    yield f"<text x='{(left + right) / 2}' y='{bottom + 36}' text-anchor='middle' fill='{INK}'>{escape(x_label)}</text>"
    middle = (top + bottom) / 2
    yield (
        f"<text x='16' y='{middle}' text-anchor='middle' fill='{INK}' transform='rotate(-90 16 {middle})'>"
        f"{escape(y_label)}</text>"
    )


def _runs(entry: Series, y: Sequence[float], x_axis: Axis, y_axis: Axis) -> list[list[tuple[float, float]]]:
    """Return pixels of the points, split where one cannot be shown."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x_value, y_value in zip(entry.x, y, strict=True):
        if x_axis.shows(x_value) and y_axis.shows(y_value):
            runs[-1].append((x_axis.pixel(x_value), y_axis.pixel(y_value)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(points: Sequence[tuple[float, float]], *, steps: bool = False) -> str:
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for x, y in points[1:]:
        path += f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}"
    return path


def _line(entry: Series, colour: str, x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    dash = f" stroke-dasharray='{DASHES[entry.dash]}'" if entry.dash else ""
    for run in _runs(entry, entry.y, x_axis, y_axis):
        if entry.style != "points":
            path = _path(run, steps=entry.style == "steps")
            line = f"fill='none' stroke='{escape(colour)}' stroke-width='2' stroke-linejoin='round'"
            parts.append(f"<path d='{path}' {line}{dash}/>")
        if entry.style in ("points", "both"):
            parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.2' fill='{escape(colour)}'/>" for x, y in run]
    return "".join(parts)


def _band(entry: Series, colour: str, x_axis: Axis, y_axis: Axis) -> str:
    if entry.low is None or entry.high is None:
        return ""
    shown = [x_axis.shows(x) and y_axis.shows(a) and y_axis.shows(b)
             for x, a, b in zip(entry.x, entry.low, entry.high, strict=True)]  # fmt: skip
    gap = math.nan
    low = [value if ok else gap for value, ok in zip(entry.low, shown, strict=True)]
    high = [value if ok else gap for value, ok in zip(entry.high, shown, strict=True)]
    lower, upper = _runs(entry, low, x_axis, y_axis), _runs(entry, high, x_axis, y_axis)
    return "".join(
        f"<path d='{_path([*below, *reversed(above)])}Z' fill='{escape(colour)}' fill-opacity='0.15'/>"
        for below, above in zip(lower, upper, strict=True)
    )


def _notes(entry: Series, x_axis: Axis, y_axis: Axis) -> str:
    if entry.notes is None:
        return ""
    parts = []
    for x, y, text in zip(entry.x, entry.y, entry.notes, strict=True):
        if text and x_axis.shows(x) and y_axis.shows(y):
            x_pixel = x_axis.pixel(x)
            inward = x_pixel > x_axis.end - 0.15 * (x_axis.end - x_axis.start)
            place = f"x='{x_pixel + (-6 if inward else 6):.1f}' y='{y_axis.pixel(y) - 6:.1f}'"
            place += " text-anchor='end'" if inward else ""
            parts.append(f"<text {place} font-size='10' fill='{INK}'>{escape(text)}</text>")
    return "".join(parts)


def _legend_rows(names: Sequence[str], width: int) -> list[list[str]]:
    """Return the names line by line, as many in each as fit."""
    rows: list[list[str]] = []
    used = math.inf
    for name in names:
        size = _legend_width(name)
        if used + size > width - _LEFT:
            rows.append([])
            used = 0.0
        rows[-1].append(name)
        used += size
    return rows


def _legend_width(name: str) -> float:
    return 40 + 6.6 * len(name)


def _legend(series: Sequence[Series], colours: Sequence[str], rows: list[list[str]], top: int) -> Iterable[str]:
    named = iter([(entry, colour) for entry, colour in zip(series, colours, strict=True) if entry.label])
    for index, row in enumerate(rows):
        x, y = float(_LEFT), top + _LEGEND_LINE * index + 4
        for name in row:
            entry, colour = next(named)
            dash = f" stroke-dasharray='{DASHES[entry.dash]}'" if entry.dash else ""
            if entry.style != "points":
                yield f"<path d='M{x:.0f} {y}h22' stroke='{escape(colour)}' stroke-width='2'{dash}/>"
            if entry.style in ("points", "both"):
                yield f"<circle cx='{x + 11:.0f}' cy='{y}' r='3.2' fill='{escape(colour)}'/>"
            yield f"<text x='{x + 28:.0f}' y='{y + 4}' fill='{INK}'>{escape(name)}</text>"
            x += _legend_width(name)
