"""`profile --plot`: what passes cost, as an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_dspark.errors import DeviceError, UsageError
from trtllm_dspark.speculation import CostTable

TITLE = "Time of a target pass"
X_LABEL, Y_LABEL = "tokens of the pass", "milliseconds"


def check_plot(path: Path) -> None:
    """Refuse an image that could not be written, before anything is measured.

    Raises:
        UsageError: another file type, or no matplotlib for a PNG.
    """
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"--plot {path}: give a name that ends in .svg or .png")
    if path.suffix == ".png":
        _pyplot()


def write_plot(path: Path, table: CostTable) -> None:
    """Draw one line a number of requests and depth, with the time of drafting in its name.

    Raises:
        UsageError: no matplotlib for a PNG.
        DeviceError: the file cannot be written.
    """
    lines = _lines(table)
    if path.suffix == ".svg":
        from trtllm_dspark.reports import Series, line_plot
        from trtllm_dspark.reports.files import write_text

        series = [Series(name, x, y, dash=int(deep)) for name, x, y, deep in lines]
        write_text(path, line_plot(series, title=TITLE, x_label=X_LABEL, y_label=Y_LABEL, x_log=True))
        return
    figure = _pyplot().Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, x, y, deep in lines:
        axes.plot(x, y, "o--" if deep else "o-", markersize=3, label=name)
    axes.set(title=TITLE, xlabel=X_LABEL, ylabel=Y_LABEL, xscale="log", ylim=(0, None))
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise DeviceError(f"{path} cannot be written ({error.strerror})") from error


def _lines(table: CostTable) -> list[tuple[str, list[float], list[float], bool]]:
    """Return (name, tokens, milliseconds, whether it is not the shallowest depth)."""
    lines = []
    shallow = min(shape.depth for shape in table.verify_us)
    for count, depth in sorted({(shape.num_requests, shape.depth) for shape in table.verify_us}):
        times = sorted((s.num_tokens, us) for s, us in table.verify_us.items() if s[0] == count and s.depth == depth)
        name = f"{count} requests, {depth} cached"
        if table.draft_us:
            name += f" (draft {table.draft_time_us(count, depth=depth) / 1e3:.1f} ms)"
        lines.append((name, [float(tokens) for tokens, _ in times], [us / 1e3 for _, us in times], depth > shallow))
    return lines


def _pyplot() -> Any:
    try:
        from matplotlib import figure
    except ImportError as error:
        raise UsageError(
            "--plot with a .png needs matplotlib: pip install '.[plot]' in a checkout, or give a name that ends in .svg"
        ) from error
    return figure
