"""Closed sets of names that the flags of a build accept; importable without onnx."""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["onnxruntime"]
WeightDtype = Literal["int8", "float32", "w8a8"]
BACKENDS: tuple[str, ...] = get_args(Backend)
WEIGHT_DTYPES: tuple[str, ...] = get_args(WeightDtype)
