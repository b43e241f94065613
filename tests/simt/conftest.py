"""Kernels on the host: needs g++ only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.kernels.backends import SimtBackend
from helpers.kernels.build import simt_library

ORDERS = {"ascending": 0, "descending": 1, "shuffled": 20260}


@pytest.fixture(scope="session")
def simt_path() -> Path:
    if shutil.which("g++") is None:
        pytest.skip("the host shim of the kernels is compiled with g++, which is not on PATH")
    return simt_library()


@pytest.fixture(params=ORDERS.values(), ids=ORDERS.keys())
def backend(simt_path: Path, request: pytest.FixtureRequest) -> Iterator[SimtBackend]:
    backend = SimtBackend(simt_path, order=request.param)
    yield backend
    backend.close()
