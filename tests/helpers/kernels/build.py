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


def _headers() -> list[Path]:
    plugins = ROOT / "plugins/tensorrt"
    own = [*KERNELS.glob("*.h"), *KERNELS.glob("*.cuh"), *CORE.rglob("*.h")]
    return [*own, *plugins.glob("*.h"), *plugins.glob("abi/*.h"), *(SIMT / "include").glob("*.h")]


def _content_hash(files: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compile_shared(name: str, sources: Sequence[Path], flags: Sequence[str], directory: Path = CACHE) -> Path:
    """Compile sources (.cu as C++) into <directory>/<name>-<hash>.so unless that exists already."""
    library = directory / f"{name}-{_content_hash([*sources, *_headers()], flags)}.so"
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


def cuda_library(nvcc: Path, compute_capability: tuple[int, int]) -> Path:
    """The kernels for one device, compiled by nvcc."""
    architecture = f"{compute_capability[0]}{compute_capability[1]}" + ("a" if compute_capability == (9, 0) else "")
    sources = [*sorted(KERNELS.glob("*_inst.cu")), KERNELS / "c_abi.cpp"]
    flags = [
        "-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC", "--Werror=all-warnings", f"-I{CORE}", "--threads=2",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
    ]  # fmt: skip
    library = CACHE / f"cuda-{architecture}-{_content_hash([*sources, *_headers()], flags)}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        temporary = library.with_suffix(".tmp.so")
        subprocess.run([nvcc, *flags, "-o", temporary, *sources], check=True)
        temporary.replace(library)
    return library
