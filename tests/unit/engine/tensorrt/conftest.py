"""Pairs and devices of the TensorRT engine's tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_tensorrt
from helpers.kernels.build import simt_library
from helpers.plugin_engine import PluginWritten, open_plugins, write_plugin_pair
from helpers.recording_device import RecordingDevice
from helpers.tiny_tensorrt import PairArrays, Written, open_on, random_pair
from helpers.toy_pair import ToyPair
from helpers.trt_fixtures import Opened

from trtllm_dspark.engine.tensorrt import TensorRtEngine, TensorRtPluginEngine
from trtllm_dspark.graph import RoundOptions


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


@pytest.fixture(scope="session")
def plugin_graphs(
    random_weights: Written, toy_weights: Written, toy_pair: ToyPair, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str], PluginWritten]:
    """Write the plugin graphs of a pair (`random` or `toy`) for an acceptance and a schedule, once."""
    pairs: dict[str, tuple[Written, Callable[[], PairArrays]]] = {
        "random": (random_weights, tiny_tensorrt.random_weights),
        "toy": (toy_weights, lambda: tiny_tensorrt.toy_weights(toy_pair)),
    }

    @cache
    def write(name: str, acceptance: Any, schedule: Any) -> PluginWritten:
        pair, weights = pairs[name]
        directory = tmp_path_factory.mktemp(f"{name}_{acceptance}_{schedule}")
        return write_plugin_pair(directory, pair, weights(), RoundOptions(acceptance, schedule))

    return write


@pytest.fixture
def opened_plugins(plugin_graphs: Callable[[str, str, str], PluginWritten]) -> Iterator[Callable[..., Any]]:
    """As `opened`, engines with plugins: of a pair's name, acceptance and schedule."""
    engines: list[TensorRtPluginEngine] = []

    def make(
        name: str, acceptance: str = "coupled", schedule: str = "threshold", *, late: bool = True, **options: Any
    ) -> Any:
        written = plugin_graphs(name, acceptance, schedule)
        device = RecordingDevice(heads=written.pair.heads, late=late)
        engines.append(open_plugins(device, written, **options))
        return engines[-1], device

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(params=["native", "plugins"])
def opened_toy(request: pytest.FixtureRequest, toy_weights: Written) -> Callable[..., Any]:
    """Open an engine of the toy pair, of either lowering; only plans with plugins are made for one acceptance."""
    if request.param == "plugins":
        plugins: Callable[..., Any] = request.getfixturevalue("opened_plugins")
        return lambda **options: plugins("toy", **options)
    native: Callable[..., Any] = request.getfixturevalue("opened")
    return lambda acceptance="coupled", **options: native(toy_weights, **options)


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
