"""Pairs and devices of the TensorRT engine's tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_tensorrt
from helpers.kernels.build import simt_library
from helpers.recording_device import RecordingDevice
from helpers.tiny_tensorrt import Written, open_on, random_pair
from helpers.toy_pair import ToyPair
from helpers.trt_fixtures import Opened

from trtllm_dspark.engine.tensorrt import TensorRtEngine


@pytest.fixture(scope="session")
def kernels() -> Path:
    """The CUDA kernels' sources, compiled for the host."""
    if shutil.which("g++") is None:
        pytest.skip("the host shim of the kernels is compiled with g++, which is not on PATH")
    return simt_library()


@pytest.fixture(scope="session")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return random_pair(tmp_path_factory.mktemp("random_pair"))


@pytest.fixture(scope="session")
def toy_weights(toy_pair: ToyPair, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return tiny_tensorrt.toy_pair(tmp_path_factory.mktemp("toy_trt"), toy_pair)


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Open engines over recording devices; they are closed behind the test, which finds what was left running."""
    engines: list[TensorRtEngine] = []

    def make(pair: Written, *, late: bool = True, kernels: str | None = "core", **options: Any) -> Any:
        library = request.getfixturevalue("kernels") if kernels == "sources" else None
        device = RecordingDevice(library, heads=pair.heads if kernels == "core" else None, late=late)
        engines.append(open_on(device, pair, **options))
        return engines[-1], device

    yield make
    for engine in engines:
        engine.close()
