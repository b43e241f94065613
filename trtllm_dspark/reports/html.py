"""One self-contained HTML page: no script, no network, readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root{color-scheme:light}
body{font:16px/1.5 system-ui,Helvetica,Arial,sans-serif;color:#222;background:#fff}
body{margin:0 auto;padding:1rem;max-width:60rem}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.15rem;margin-top:2rem}
figure{margin:1rem 0}figcaption{font-size:.875rem;color:#555}svg{max-width:100%;height:auto}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{border-bottom:2px solid #222}
pre{overflow-x:auto;background:#f5f5f5;padding:.6rem;font-size:.8rem}
.note{background:#fff6e0;border-left:4px solid #e69f00;padding:.5rem .8rem}
"""


class Page:
    """Build a page from top to bottom; every text is escaped, plots are trusted.

    Args:
        title: of the page.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Add a section's heading."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def note(self, text: str) -> None:
        """Add a paragraph that must not be overlooked."""
        self._parts.append(f"<p class='note'>{escape(text)}</p>")

    def code(self, text: str) -> None:
        """Add text as it is, in a fixed-width face."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def figure(self, svg: str, caption: str = "") -> None:
        """Add a plot of `reports.svg`; it is not escaped."""
        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        self._parts.append(f"<figure>{svg}{below}</figure>")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table; numbers are shortened, None is a dash."""
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell_text(cell))}</td>' for cell in row)}</tr>" for row in rows)
        self._parts.append(f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>")

    def __str__(self) -> str:
        """Return the whole page."""
        title = escape(self._title)
        return (
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
            "<meta name='viewport' content='width=device-width,initial-scale=1'>"
            f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n"
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )


def cell_text(value: object) -> str:
    """Return a table cell's text: four significant digits, whole numbers in full."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
