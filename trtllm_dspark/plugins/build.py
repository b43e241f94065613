"""Building the kernel and plugin libraries from the source tree with CMake."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.errors import ConfigError, DeviceError
from trtllm_dspark.plugins.contract import contract_hash, plugin_contract
from trtllm_dspark.plugins.toolchain import CUDA_MAJOR, Toolchain, find_tensorrt_headers, find_toolchain

KERNELS_NAME = "libtrtllm_dspark_kernels.so"
PLUGINS_NAME = "libtrtllm_dspark_plugins.so"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltLibraries:
    """What a build left in the output directory."""

    kernels: Path
    plugins: Path
    contract_hash: str
    toolchain: Toolchain
    tensorrt_headers: Path | None


def default_source_dir() -> Path:
    """Return the source tree this package was installed from in editable mode, or the current directory."""
    beside_package = Path(__file__).parents[2]
    return beside_package if (beside_package / "plugins/tensorrt").is_dir() else Path.cwd()


def build_plugins(
    *,
    source_dir: Path,
    output_dir: Path,
    build_dir: Path | None = None,
    nvcc: Path | None = None,
    tensorrt_include_dir: Path | None = None,
    cuda_architectures: str | None = None,
    jobs: int = 2,
) -> BuiltLibraries:
    """Configure, compile and copy both libraries.

    Args:
        source_dir: checkout of this project.
        output_dir: receives the two libraries.
        build_dir: CMake's build folder; None = `<source_dir>/build/tensorrt`.
        nvcc: compiler; None = found by `find_toolchain`.
        tensorrt_include_dir: folder of TensorRT 11's headers; None = found, else the project's own declarations.
        cuda_architectures: semicolon-separated CMake list, for example `90a-real`; None = every supported GPU.
        jobs: parallel compilations.

    Raises:
        ConfigError: source_dir or tensorrt_include_dir is not what it should be.
        DeviceError: a tool is missing, or compiling failed (the message ends with the compiler's last lines).
    """
    if not (source_dir / "plugins/tensorrt/CMakeLists.txt").is_file():
        raise ConfigError(f"--source_dir {source_dir} is not a checkout of trtllm_dspark; wheels carry no sources")
    if tensorrt_include_dir and not (tensorrt_include_dir / "NvInferRuntime.h").is_file():
        raise ConfigError(f"--tensorrt_include_dir {tensorrt_include_dir} has no NvInferRuntime.h")
    toolchain = find_toolchain(nvcc)
    headers = tensorrt_include_dir or find_tensorrt_headers()
    build_dir = build_dir or source_dir / "build/tensorrt"
    configure = [
        *("--preset", "tensorrt", "-B", str(build_dir)),
        f"-DCMAKE_CUDA_COMPILER={toolchain.nvcc}",
        f"-DTENSORRT_INCLUDE_DIR={headers or ''}",
    ]
    root = toolchain.include_dir.parent
    if not (root / "lib64").exists():
        # PyPI's wheels have `lib` where nvcc links from `lib64`, and no unversioned libcudart.so for CMake to find.
        cudart = root / f"lib/libcudart.so.{CUDA_MAJOR}"
        configure += [f"-DCMAKE_CUDA_FLAGS=-L{cudart.parent}", f"-DCUDAToolkit_ROOT={root}", f"-DCUDA_CUDART={cudart}"]
    if cuda_architectures:
        configure.append(f"-DCMAKE_CUDA_ARCHITECTURES={cuda_architectures}")
    _cmake(configure, source_dir)
    _cmake(["--build", str(build_dir), "--parallel", str(jobs)], source_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    libraries = []
    for folder, name in (("kernels", KERNELS_NAME), ("tensorrt", PLUGINS_NAME)):
        # Renamed into place: a process may have the old file mapped.
        temporary = output_dir / f".{name}.{os.getpid()}"
        shutil.copy2(build_dir / "plugins" / folder / name, temporary)
        temporary.replace(output_dir / name)
        libraries.append(output_dir / name)
    return BuiltLibraries(
        kernels=libraries[0],
        plugins=libraries[1],
        contract_hash=contract_hash(plugin_contract(libraries[1])),
        toolchain=toolchain,
        tensorrt_headers=headers,
    )


def _tool(name: str) -> Path:
    beside_python = Path(sys.executable).parent / name
    found = beside_python if beside_python.exists() else shutil.which(name)
    if found is None or (name == "ninja" and importlib.util.find_spec("ninja") is None and not shutil.which(name)):
        raise DeviceError(f"{name} is missing; install it with: pip install {name}")
    return Path(found)


def _cmake(arguments: list[str], source_dir: Path) -> None:
    cmake, ninja = _tool("cmake"), _tool("ninja")
    path = os.pathsep.join([str(ninja.parent), os.environ.get("PATH", "")])
    command = [str(cmake), *arguments]
    _LOG.info("%s", " ".join(command))
    result = subprocess.run(
        command,
        cwd=source_dir,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        tail = "\n".join(result.stdout.strip().splitlines()[-12:])
        raise DeviceError(f"cmake {arguments[0]} failed with code {result.returncode}:\n{tail}")
