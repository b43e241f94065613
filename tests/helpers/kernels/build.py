"""Compiling the kernel sources for a test: each object once per content, whichever library wants it."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.shared_builds import locked

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "plugins/kernels"
CORE = ROOT / "plugins/core/include"
SIMT = ROOT / "tests/simt"
CACHE = ROOT / "build/tests"
KERNEL_SOURCES = [*sorted(KERNELS.glob("*_inst.cu")), KERNELS / "c_abi.cpp"]
SIMT_SOURCES = [*KERNEL_SOURCES, SIMT / "simt.cpp"]
_INCLUDE = re.compile(r'^ *# *include [<"]([^>"]+)[>"]', re.MULTILINE)

SIMT_FLAGS = [
    "-std=c++17", "-O2", "-fPIC", "-fvisibility=default", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
    "-ffp-contract=off", "-DDSPARK_SIMT", f"-I{SIMT / 'include'}", f"-I{CORE}", f"-I{KERNELS}",
]  # fmt: skip


def read_by(source: Path, flags: Sequence[str]) -> list[Path]:
    """Return a source and every file of ours that it includes, directly or not."""
    folders = [Path(flag[2:]) for flag in flags if flag.startswith("-I")]
    found, waiting = [source], [source]
    while waiting:
        file = waiting.pop()
        for name in _INCLUDE.findall(file.read_text()):
            path = next((path for folder in (file.parent, *folders) if (path := folder / name).exists()), None)
            if path is not None and path not in found:
                found.append(path)
                waiting.append(path)
    return found


def _content_hash(files: Sequence[Path], flags: Sequence[str]) -> str:
    # Not the folders: the files found there are hashed.
    digest = hashlib.sha256(" ".join(flag for flag in flags if not flag.startswith("-I")).encode())
    for file in sorted(files, key=lambda file: file.name):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compile_object(source: Path, flags: Sequence[str], directory: Path = CACHE) -> Path:
    """Compile a source (.cu as C++) into <directory>/<name>-<hash>.o unless that exists already."""
    target = directory / f"{source.name}-{_content_hash(read_by(source, flags), flags)}.o"
    with locked(target):
        if not target.exists():
            temporary = target.with_suffix(".tmp.o")
            subprocess.run(["g++", "-x", "c++", *flags, "-c", str(source), "-o", str(temporary)], check=True)
            temporary.replace(target)
    return target


def compile_shared(name: str, sources: Iterable[tuple[Path, Sequence[str]]], directory: Path = CACHE) -> Path:
    """Link sources, each compiled with its flags, into <directory>/<name>-<hash>.so unless that exists already."""
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda pair: compile_object(pair[0], pair[1], directory), sources))
    library = directory / f"{name}-{_content_hash(objects, [])}.so"
    with locked(library):
        if not library.exists():
            temporary = library.with_suffix(".tmp.so")
            subprocess.run(["g++", "-shared", "-o", str(temporary), *map(str, objects)], check=True)
            temporary.replace(library)
    return library


def simt_library() -> Path:
    """The kernels and the shim for the host."""
    return compile_shared("simt", [(source, SIMT_FLAGS) for source in SIMT_SOURCES])


def cuda_library(nvcc: Path, compute_capability: tuple[int, int]) -> Path:
    """The kernels for one device, compiled by nvcc."""
    architecture = f"{compute_capability[0]}{compute_capability[1]}" + ("a" if compute_capability == (9, 0) else "")
    sources = KERNEL_SOURCES
    flags = [
        "-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC", "--Werror=all-warnings", f"-I{CORE}", "--threads=2",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
    ]  # fmt: skip
    files = {file for source in sources for file in read_by(source, flags)}
    library = CACHE / f"cuda-{architecture}-{_content_hash(list(files), flags)}.so"
    with locked(library):
        if not library.exists():
            temporary = library.with_suffix(".tmp.so")
            subprocess.run([nvcc, *flags, "-o", temporary, *sources], check=True)
            temporary.replace(library)
    return library
