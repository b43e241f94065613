"""Plots are well-formed SVG that shows every value where it belongs and never trusts a label."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from trtllm_dspark.reports.axis import fit_axis, format_tick
from trtllm_dspark.reports.svg import Series, line_plot

NAMES = {"title": "t", "x_label": "x", "y_label": "y"}


def circles(svg: str) -> list[tuple[float, float]]:
    """Return centres of the points, the legend's too."""
    return [(float(x), float(y)) for x, y in re.findall(r"<circle cx='([^']+)' cy='([^']+)'", svg)]


def test_points_stand_where_their_values_say() -> None:
    svg = line_plot([Series("", [0, 5, 10], [0, 50, 100])], x_limits=(0, 10), y_limits=(0, 100), **NAMES)
    (x0, y0), (x1, y1), (x2, y2) = circles(svg)
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2))
    assert x2 > x0
    assert y2 < y0


def test_log_axis_spaces_factors_evenly_and_leaves_out_what_it_cannot_show() -> None:
    svg = line_plot([Series("", [1, 10, 100, 0, -3], [1, 1, 1, 1, 1], style="points")], x_log=True, **NAMES)
    xs = [x for x, _ in circles(svg)]
    assert len(xs) == 3
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)


def test_nan_leaves_a_gap() -> None:
    svg = line_plot([Series("a", [1, 2, 3, 4, 5], [1, 2, math.nan, 4, 5], style="line")], **NAMES)
    lines = re.findall(r"<path d='(M[^']+)' fill='none' stroke='#0072b2'", svg)
    assert [line.count("L") for line in lines] == [1, 1]


def test_band_and_legend_and_notes_are_drawn() -> None:
    series = [
        Series("first", [1, 2], [1, 2], low=[0.5, 1.5], high=[1.5, 2.5], notes=["p", ""]),
        Series("second", [1, 2], [2, 1], dash=1, style="steps"),
    ]
    svg = line_plot(series, **NAMES)
    assert svg.count("fill-opacity") == 1
    assert re.findall(r">(first|second|p)</text>", svg) == ["p", "first", "second"]
    assert "stroke-dasharray" in svg


def test_labels_are_escaped_and_the_result_is_well_formed() -> None:
    evil = "</text><script>alert('x')</script>&\""
    svg = line_plot([Series(evil, [1], [1], notes=[evil], colour=evil)], title=evil, x_label=evil, y_label=evil)
    assert "<script" not in svg
    root = ElementTree.fromstring(svg)
    assert evil in [element.text for element in root.iter()]


def test_no_values_is_still_a_plot() -> None:
    assert ElementTree.fromstring(line_plot([], **NAMES)).tag.endswith("svg")
    assert "nan" not in line_plot([Series("a", [], [])], x_log=True, y_log=True, **NAMES)


def test_same_input_same_text() -> None:
    make = lambda: line_plot([Series("a", [1, 2], [3, 4])], **NAMES)  # noqa: E731
    assert make() == make()


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1, 100, True, [1, 2, 5, 10, 20, 50, 100]),
        (1, 10**6, True, [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
        (60, 70, True, [60, 62, 64, 66, 68, 70]),
    ],
)
def test_ticks_are_round(low: float, high: float, log: bool, ticks: list[float]) -> None:
    axis = fit_axis((), start=0, end=1, log=log, limits=(low, high))
    assert axis.ticks() == pytest.approx(ticks)


def test_tick_text_is_short() -> None:
    assert [format_tick(value) for value in (0.05, 80, 1200, 3e6, 0)] == ["0.05", "80", "1.2k", "3M", "0"]
