"""What the passes run on, in words."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model name, or its architecture where the system does not tell."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()
