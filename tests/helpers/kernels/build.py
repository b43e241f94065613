"""Compiling the kernel sources for a test, once per content."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "plugins/kernels"
CORE = ROOT / "plugins/core/include"
SIMT = ROOT / "tests/simt"
CACHE = ROOT / "build/tests"

SIMT_FLAGS = [
    "-std=c++17", "-O2", "-fPIC", "-fvisibility=default", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
    "-ffp-contract=off", "-DDSPARK_SIMT", f"-I{SIMT / 'include'}", f"-I{CORE}", f"-I{KERNELS}",
]  # fmt: skip


def _content_hash(files: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compile_shared(name: str, sources: Sequence[Path], flags: Sequence[str], directory: Path = CACHE) -> Path:
    """Compile sources (.cu as C++) into <directory>/<name>-<hash>.so unless that exists already."""
    headers = [*KERNELS.glob("*.h"), *KERNELS.glob("*.cuh"), *CORE.rglob("*.h"), *(SIMT / "include").glob("*.h")]
    library = directory / f"{name}-{_content_hash([*sources, *headers], flags)}.so"
    if library.exists():
        return library
    work = directory / f"{library.stem}.build"
    work.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> str:
        output = work / f"{source.name}.o"
        subprocess.run(["g++", "-x", "c++", *flags, "-c", str(source), "-o", str(output)], check=True)
        return str(output)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    temporary = work / library.name
    subprocess.run(["g++", "-shared", "-o", str(temporary), *objects], check=True)
    temporary.replace(library)
    shutil.rmtree(work)
    return library


def simt_library() -> Path:
    """The kernels and the shim for the host."""
    return compile_shared(
        "simt", [*sorted(KERNELS.glob("*_inst.cu")), KERNELS / "c_abi.cpp", SIMT / "simt.cpp"], SIMT_FLAGS
    )
