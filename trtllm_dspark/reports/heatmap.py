"""Values over a grid as SVG text: cells with numbers, and the cells of a region outlined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from trtllm_dspark.reports.svg import FONT, INK

_LEFT, _TOP, _CELL_W, _CELL_H = 74, 58, 58, 26
_COLD, _MIDDLE, _WARM = (217, 95, 2), (255, 255, 255), (0, 114, 178)


def heatmap(
    values: Sequence[Sequence[float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_names: Sequence[str],
    y_names: Sequence[str],
    inside: Callable[[float], bool],
    show: Callable[[float], str],
    middle: float = 0.0,
    reach: float = 1.0,
) -> str:
    """Return an `<svg>` element of a grid.

    Args:
        values: [rows][columns], first row on top.
        title: above the grid.
        x_label: below the columns' names.
        y_label: beside the rows.
        x_names: one a column.
        y_names: one a row.
        inside: whether a cell belongs to the region that is outlined.
        show: a cell's text.
        middle: value that is white.
        reach: distance from it at which the colour is full.
    """
    width = _LEFT + _CELL_W * len(x_names) + 16
    height = _TOP + _CELL_H * len(y_names) + 44
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT} font-size='12' "
        f"style='max-width:100%;height:auto' width='{width}'>",
        f"<title>{escape(title)}</title><rect width='{width}' height='{height}' fill='#fff'/>",
        f"<text x='10' y='20' font-size='14' font-weight='600' fill='{INK}'>{escape(title)}</text>",
        f"<text x='10' y='{_TOP - 14}' fill='{INK}'>{escape(y_label)}</text>",
    ]
    outlines = []
    for row, (name, line) in enumerate(zip(y_names, values, strict=True)):
        y = _TOP + _CELL_H * row
        parts.append(f"<text x='{_LEFT - 8}' y='{y + 17}' text-anchor='end' fill='{INK}'>{escape(name)}</text>")
        for column, value in enumerate(line):
            x = _LEFT + _CELL_W * column
            box = f"x='{x}' y='{y}' width='{_CELL_W}' height='{_CELL_H}'"
            parts.append(f"<rect {box} fill='{_colour((value - middle) / reach)}' stroke='#fff'/>")
            place = f"x='{x + _CELL_W / 2}' y='{y + 17}' text-anchor='middle'"
            parts.append(f"<text {place} fill='{INK}'>{escape(show(value))}</text>")
            if inside(value):
                outlines.append(f"<rect {box} fill='none' stroke='{INK}' stroke-width='2'/>")
    for column, name in enumerate(x_names):
        centre, y = _LEFT + _CELL_W * (column + 0.5), _TOP + _CELL_H * len(y_names) + 16
        parts.append(f"<text x='{centre}' y='{y}' text-anchor='middle' fill='{INK}'>{escape(name)}</text>")
    place = f"x='{_LEFT + _CELL_W * len(x_names) / 2}' y='{height - 10}' text-anchor='middle'"
    parts.append(f"<text {place} fill='{INK}'>{escape(x_label)}</text>")
    return "\n".join([*parts, *outlines, "</svg>"]) + "\n"


def _colour(share: float) -> str:
    """Return a colour for -1 (cold) over 0 (white) to 1 (warm), light enough to read on."""
    end = _WARM if share > 0 else _COLD
    amount = min(1.0, abs(share)) * 0.6
    mixed = (round(white + (full - white) * amount) for white, full in zip(_MIDDLE, end, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
