"""Closed sets of names that the flags of a build accept."""

from __future__ import annotations

from typing import Literal

Backend = Literal["onnxruntime"]
WeightDtype = Literal["int8", "float32", "w8a8"]
