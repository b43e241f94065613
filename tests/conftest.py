"""Shared pytest configuration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensorrt_include_dir",
        type=Path,
        help="folder of TensorRT 11's own headers, to compare plugins/tensorrt/abi with",
    )
