"""Compile a target and its drafter into an engine directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtllm_dspark.build.config import BuildConfig
from trtllm_dspark.engine_dir import EngineDirectory, open_engine_dir

if TYPE_CHECKING:
    from trtllm_dspark.build.builder import build_engine
    from trtllm_dspark.build.report import BuildReport

__all__ = ["BuildConfig", "BuildReport", "EngineDirectory", "build_engine", "open_engine_dir"]


def __getattr__(name: str) -> Any:
    # The builder needs onnx and the checkpoint readers; whoever only opens an engine does not pay for importing them.
    if name == "build_engine":
        from trtllm_dspark.build.builder import build_engine

        return build_engine
    if name == "BuildReport":
        from trtllm_dspark.build.report import BuildReport

        return BuildReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
