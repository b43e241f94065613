"""plugins/tensorrt/abi has the binary layout of TensorRT's own headers: slots, sizes, offsets, values, versions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.kernels.build import SIMT
from helpers.kernels.plugin_harness import PLUGINS

from trtllm_dspark.plugins.toolchain import find_tensorrt_headers

HERE = Path(__file__).parent


def _layout(include_dir: Path, work: Path) -> list[str]:
    if shutil.which("g++") is None:
        pytest.skip("the layout is printed by a program compiled with g++, which is not on PATH")
    program = work / "layout"
    includes = [f"-I{include_dir}", f"-I{SIMT / 'include'}"]
    subprocess.run(["g++", "-std=c++17", "-w", *includes, HERE / "abi_layout.cpp", "-o", program], check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


def test_abi_layout_equals_what_tensorrt_11_headers_print(tmp_path: Path) -> None:
    """abi_layout_11.txt is what the program prints when compiled against TensorRT 11.1's own headers."""
    recorded = (HERE / "abi_layout_11.txt").read_text().splitlines()
    assert _layout(PLUGINS / "abi", tmp_path) == recorded


def test_abi_layout_equals_headers_at_hand(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = request.config.getoption("--tensorrt_include_dir") or find_tensorrt_headers()
    if given is None:
        pytest.skip("TensorRT 11's own headers are not here; name their folder with --tensorrt_include_dir")
    official = tmp_path / "official"
    official.mkdir()
    assert _layout(PLUGINS / "abi", tmp_path) == _layout(given, official)
