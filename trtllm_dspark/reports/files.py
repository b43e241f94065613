"""Write reports: HTML, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_dspark.errors import DeviceError


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        DeviceError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"{path} cannot be written ({error.strerror})") from error


def json_text(content: Mapping[str, Any]) -> str:
    """Return JSON that people can read too."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV with one column a name, in the order in which the names appear; None is empty.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_safe(row.get(name)) for name in columns])
    return buffer.getvalue()


def _safe(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value
