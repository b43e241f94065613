"""Closed sets of names that the flags of a build accept; importable without onnx."""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["onnxruntime", "tensorrt", "tensorrt_rtx"]
WeightDtype = Literal["int8", "float32", "w8a8", "float16", "bfloat16", "int4", "fp8"]
"""How linear layers are stored, in the words of the flags."""
Dtype = Literal["float16", "bfloat16"]
BACKENDS: tuple[str, ...] = get_args(Backend)
GPU_BACKENDS: tuple[str, ...] = ("tensorrt", "tensorrt_rtx")
WEIGHT_DTYPES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("int8", "float32", "w8a8"),
    "tensorrt": ("int8", "int4", "fp8"),
    "tensorrt_rtx": ("int8", "int4", "fp8"),
}
"""What `--weight_dtype` may be: formats of ONNX Runtime's kernels, weight-only formats of TensorRT."""
DTYPES: tuple[str, ...] = get_args(Dtype)
"""What TensorRT's engines compute in, and store where no weight-only format is asked for."""
GPU_ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "tensorrt": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"),
    "tensorrt_rtx": ("sm80", "sm86", "sm89", "sm120", "sm121"),
}
"""tensorrt: what the plugin library is compiled for; tensorrt_rtx: what its builder compiles for."""
FP8_ARCHITECTURES: tuple[str, ...] = ("sm89", "sm90", "sm100", "sm120", "sm121")
PROFILING_VERBOSITIES: tuple[str, ...] = ("layer_names_only", "detailed", "none")
Acceptance = Literal["greedy", "rejection", "coupled"]
Schedule = Literal["fixed", "threshold", "early_stop", "stale_topk"]
ACCEPTANCES: tuple[str, ...] = get_args(Acceptance)
SCHEDULES: tuple[str, ...] = get_args(Schedule)
"""Of a plugin engine's round; those of `graph.round_options`."""
