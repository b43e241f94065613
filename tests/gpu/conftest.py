"""The kernels on a CUDA device: needs a driver, a device and nvcc, nothing else of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.kernels.backends import CudaBackend, CudaDriver
from helpers.kernels.build import cuda_library

from trtllm_dspark.errors import DeviceError
from trtllm_dspark.plugins import find_toolchain


@pytest.fixture(scope="session")
def cuda_path() -> Path:
    if not CudaDriver.is_available():
        pytest.skip("no CUDA device: libcuda.so.1 is missing or finds none")
    try:
        toolchain = find_toolchain()
    except DeviceError as error:
        pytest.skip(str(error))
    return cuda_library(toolchain.nvcc, CudaDriver().compute_capability())


@pytest.fixture
def backend(cuda_path: Path) -> Iterator[CudaBackend]:
    backend = CudaBackend(cuda_path)
    yield backend
    backend.close()
