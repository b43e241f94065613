"""The GPU builders by `--backend`."""

from __future__ import annotations

from trtllm_dspark.build.tensorrt.toolkit import TENSORRT, Toolkit
from trtllm_dspark.build.tensorrt_rtx import TENSORRT_RTX

TOOLKITS: dict[str, Toolkit] = {toolkit.backend: toolkit for toolkit in (TENSORRT, TENSORRT_RTX)}
