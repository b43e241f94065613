"""What each compiled kernel takes: registers, stack, spilled bytes, shared memory, read with cuobjdump."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.errors import DeviceError

_NAMES = {"f": "float", "a": "int8", "6__half": "float16", "13__nv_bfloat16": "bfloat16"}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class KernelResources:
    """One kernel for one architecture; `shared_bytes` is the static part, most kernels ask for theirs at launch."""

    architecture: str
    kernel: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


def read_resources(library: Path, cuobjdump: Path) -> list[KernelResources]:
    """Return the resources of every kernel in a library.

    Raises:
        DeviceError: cuobjdump fails or finds no kernel.
    """
    result = subprocess.run([cuobjdump, "-res-usage", library], capture_output=True, text=True)
    rows: list[KernelResources] = []
    architecture = name = ""
    for line in result.stdout.splitlines():
        if line.startswith("arch = "):
            architecture = line.removeprefix("arch = ").strip()
        elif match := re.match(r" Function (\S+):", line):
            name = kernel_name(match[1])
        elif match := _USAGE.search(line):
            registers, stack, shared, local = (int(value) for value in match.groups())
            rows.append(KernelResources(architecture, name, registers, stack, local, shared))
    if result.returncode or not rows:
        raise DeviceError(f"{cuobjdump} found no kernels in {library}: {result.stderr.strip()}")
    return rows


def kernel_name(mangled: str) -> str:
    """Return `kernel<arguments>` of a mangled name in namespace dspark."""
    match = re.match(r"_ZN6dspark(\d+)", mangled)
    if not match:
        return mangled
    end = match.end() + int(match[1])
    name, rest = mangled[match.end() : end], mangled[end:]
    if not rest.startswith("I"):
        return name
    arguments = re.match(r"I((?:\d+__half|\d+__nv_bfloat16|[fa])?(?:Li\d+E)*)E", rest)
    if not arguments:
        return name
    kind = re.match(r"[^L]*", arguments[1])
    parts = [_NAMES.get(kind[0], kind[0])] if kind and kind[0] else []
    parts += re.findall(r"Li(\d+)E", arguments[1])
    return f"{name}<{', '.join(parts)}>"


def format_resources(rows: Sequence[KernelResources]) -> str:
    """Return a table of registers, one kernel a line, one architecture a column; `!` marks stack or spilled bytes."""
    architectures = sorted({row.architecture for row in rows}, key=lambda name: int(re.sub(r"\D", "", name)))
    kernels = sorted({row.kernel for row in rows})
    cells = {(row.kernel, row.architecture): row for row in rows}
    width = max(map(len, kernels))
    lines = [f"{'registers a thread':<{width}} " + " ".join(f"{name:>7}" for name in architectures)]
    for kernel in kernels:
        texts = []
        for architecture in architectures:
            row = cells.get((kernel, architecture))
            mark = "!" if row and (row.stack_bytes or row.local_bytes) else ""
            texts.append(f"{'-' if row is None else f'{row.registers}{mark}':>7}")
        lines.append(f"{kernel:<{width}} " + " ".join(texts))
    return "\n".join(lines)
