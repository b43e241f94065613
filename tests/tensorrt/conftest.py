"""Plugin libraries to test: one compiled for the host (needs g++), one as users build it (needs CUDA 13's nvcc)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.kernels.build import CACHE, ROOT
from helpers.kernels.plugin_harness import Harness, host_plugin_library

from trtllm_dspark.errors import DeviceError
from trtllm_dspark.plugins import PluginSpec, find_toolchain, parse_contract, plugin_contract
from trtllm_dspark.plugins.build import build_plugins


@pytest.fixture(scope="session")
def host_plugins() -> Path:
    if shutil.which("g++") is None:
        pytest.skip("the plugin library is compiled for the host with g++, which is not on PATH")
    return host_plugin_library()


@pytest.fixture(scope="session")
def harness(host_plugins: Path) -> Harness:
    return Harness(host_plugins)


@pytest.fixture(scope="session")
def specs(host_plugins: Path) -> dict[str, PluginSpec]:
    return parse_contract(plugin_contract(host_plugins))


@pytest.fixture(scope="session")
def built_plugins() -> Path:
    """The library that `trtllm-dspark build_plugins` makes, for every supported GPU."""
    try:
        find_toolchain()
    except DeviceError as error:
        pytest.skip(str(error))
    return build_plugins(source_dir=ROOT, output_dir=CACHE / "plugins", build_dir=ROOT / "build/tensorrt").plugins
