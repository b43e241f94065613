"""A machine without TensorRT-RTX: the build says what to install before it writes anything."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.build.gpu_options import GpuOptions
from trtllm_dspark.errors import DeviceError


def test_build_without_the_builder_names_the_extra(tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    config = replace(tiny_config, backend="tensorrt_rtx", gpu=GpuOptions(gpu_architectures=("sm89",)))
    with pytest.raises(DeviceError, match=r"pip install '.\[tensorrt-rtx\]' in a checkout"):
        build_engine(config)
    assert not config.output_dir.parent.exists()
