"""Finding what the CUDA libraries are built with, and saying what is missing and how to get it."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.errors import DeviceError

CUDA_MAJOR = 13
"""The CUDA release line that TensorRT 11's cu13 builds and these sources are made for."""


@dataclass(frozen=True)
class Toolchain:
    """Tools of one CUDA toolkit."""

    nvcc: Path
    version: tuple[int, int]
    include_dir: Path
    cuobjdump: Path | None


def find_toolchain(nvcc: str | Path | None = None) -> Toolchain:
    """Find nvcc 13 with the CUDA runtime's headers: the one named, the one on PATH, /usr/local/cuda, or PyPI's wheels.

    Raises:
        DeviceError: none is usable; the message says why and how to get one.
    """
    reasons = []
    for candidate in [Path(nvcc)] if nvcc else _candidates():
        try:
            return _inspect(candidate)
        except DeviceError as error:
            reasons.append(str(error))
    found = "; ".join(reasons) if reasons else "no nvcc on PATH, in /usr/local/cuda or in this Python's packages"
    raise DeviceError(
        f"no usable CUDA {CUDA_MAJOR} compiler: {found}; install the CUDA toolkit, or "
        f"pip install nvidia-cuda-{{nvcc,crt,runtime,cccl}}=={CUDA_MAJOR}.0.* nvidia-nvvm=={CUDA_MAJOR}.0.*"
    )


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    for folder in (Path("/usr/local/cuda"), *_wheel_roots()):
        if (folder / "bin/nvcc").exists():
            yield folder / "bin/nvcc"


def _wheel_roots() -> list[Path]:
    return [Path(folder) / f"nvidia/cu{CUDA_MAJOR}" for folder in site.getsitepackages()]


def _inspect(nvcc: Path) -> Toolchain:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"{nvcc} does not run ({error})") from error
    match = re.search(r"release (\d+)\.(\d+)", text)
    if not match:
        raise DeviceError(f"{nvcc} does not tell its version")
    version = (int(match[1]), int(match[2]))
    if version[0] != CUDA_MAJOR:
        raise DeviceError(f"{nvcc} is CUDA {version[0]}.{version[1]}, expected {CUDA_MAJOR}")
    root = nvcc.resolve().parent.parent
    include = root / "include"
    if not (include / "cuda_runtime.h").exists():
        raise DeviceError(f"{include}/cuda_runtime.h is missing beside {nvcc} (PyPI: nvidia-cuda-runtime)")
    return Toolchain(nvcc=nvcc, version=version, include_dir=include, cuobjdump=find_cuobjdump(root))


def find_cuobjdump(root: Path | None = None) -> Path | None:
    """Find cuobjdump: in the toolkit at `root`, on PATH, or PyPI's `nvidia-cuda-cuobjdump`; None when there is none."""
    on_path = shutil.which("cuobjdump")
    folders = [*([root] if root else []), *_wheel_roots()]
    places = [folder / "bin/cuobjdump" for folder in folders] + ([Path(on_path)] if on_path else [])
    return next((place for place in places if place.exists()), None)


def find_tensorrt_headers() -> Path | None:
    """Find the folder of TensorRT 11's own NvInferRuntime.h where packages and containers put it; None when absent."""
    for folder in ("/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu", "/usr/local/tensorrt/include"):
        header = Path(folder) / "NvInferVersion.h"
        if header.exists() and re.search(r"define (TRT_MAJOR_ENTERPRISE|NV_TENSORRT_MAJOR) 11\b", header.read_text()):
            return Path(folder)
    return None
