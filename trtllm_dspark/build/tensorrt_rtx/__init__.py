"""TensorRT-RTX: the same builder interface as TensorRT, without plugins, timing or the need for a GPU."""

from trtllm_dspark.build.tensorrt.toolkit import Toolkit

TENSORRT_RTX = Toolkit(
    "tensorrt_rtx", "TensorRT-RTX", "tensorrt_rtx", "tensorrt_rtx_cu13", "tensorrt-rtx", "1.7", needs_gpu=False
)

__all__ = ["TENSORRT_RTX"]
