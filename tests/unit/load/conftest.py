"""The stub of libnvidia-ml.so.1, built once."""

from __future__ import annotations

import pytest
from helpers.nvml_stub import NvmlStub, build_stub


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    stub = build_stub(tmp_path_factory.mktemp("nvml"))
    if stub is None:
        pytest.skip("the NVML stub needs a C compiler")
    return stub
