"""Replay traces of a device to the real nvidia-ml-py, through a libnvidia-ml.so.1 of our own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRACES = HERE / "traces"


@dataclass(frozen=True)
class NvmlStub:
    """A built stub; `folder` holds libnvidia-ml.so.1."""

    folder: Path

    def environment(self, trace: str) -> dict[str, str]:
        """Return an environment in which ctypes finds the stub and the stub finds `traces/{trace}.trace`."""
        search = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.folder),
            "NVML_STUB_TRACE": str(TRACES / f"{trace}.trace"),
            "PYTHONPATH": os.pathsep.join(search),
        }

    def run(self, trace: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run Python with `command` on a trace."""
        return subprocess.run(
            [sys.executable, *command],
            env=self.environment(trace),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def replay(self, trace: str, device: str = "0") -> list[dict[str, Any]]:
        """Return `sample` and `state` of every sample of a trace."""
        done = self.run(trace, "-m", "helpers.nvml_stub.replay", device)
        if done.returncode != 0:
            raise RuntimeError(f"replaying {trace} failed: {done.stderr}")
        return [json.loads(line) for line in done.stdout.splitlines()]


def build_stub(folder: Path) -> NvmlStub | None:
    """Compile the stub; None without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", folder / "libnvidia-ml.so.1", HERE / "nvml.c"], check=True)
    return NvmlStub(folder)
