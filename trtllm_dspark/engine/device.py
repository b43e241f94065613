"""What the passes run on, in words."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path


def device_name(backend: str, gpu_architectures: Sequence[str]) -> str:
    """Return what an engine's passes run on: the processor's model, or the architectures it was compiled for."""
    return cpu_name() if backend == "onnxruntime" else f"GPU {', '.join(gpu_architectures)}"


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
