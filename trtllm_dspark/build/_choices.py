"""Closed sets of names that the flags of a build accept; importable without onnx."""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["onnxruntime", "tensorrt_rtx"]
WeightDtype = Literal["int8", "float32", "w8a8", "float16", "bfloat16"]
BACKENDS: tuple[str, ...] = get_args(Backend)
WEIGHT_DTYPES: tuple[str, ...] = ("int8", "float32", "w8a8")
"""What ONNX Runtime's engines store."""
DTYPES: tuple[str, ...] = ("float16", "bfloat16")
"""What TensorRT's engines compute in and store."""
GPU_ARCHITECTURES: tuple[str, ...] = ("sm80", "sm86", "sm89", "sm120", "sm121")
