"""Drafter weights stored as int8 with one scale a row: this package's own small shipping format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.checkpoint.arrays import Array, LazyArray
from trtllm_dspark.checkpoint.safetensors_io import StoredTensor
from trtllm_dspark.errors import CheckpointError

METHOD = "int8_per_row"
SCALE_SUFFIX = "_scale"
# Vocabulary maps of reduced drafters.
_INTEGER_TENSORS = ("d2t", "t2d")


def quantise_rows(weight: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Return int8 values [rows, columns] and float32 scales [rows] with `weight ~ values * scales[:, None]`.

    Symmetric round-to-nearest; the largest magnitude of a row becomes 127, so packing twice changes nothing. A row of
    zeros, or of numbers too small for a normal scale, becomes zeros.
    """
    scales = (np.abs(weight).max(axis=1) / np.float32(127)).astype(np.float32)
    scales[scales < np.finfo(np.float32).tiny] = 1
    return np.rint(weight / scales[:, None]).astype(np.int8), scales


def unpack(stored: Mapping[str, StoredTensor], quantization: Any, config_path: Path) -> dict[str, LazyArray]:
    """Return the tensors as lazily read float32, int8 ones multiplied by their `{name}_scale`.

    Args:
        stored: the tensors of the files.
        quantization: the configuration's `quantization` field; None when the checkpoint is not quantised.
        config_path: named in messages.

    Raises:
        CheckpointError: the field is not one this package writes, or an int8 tensor has no fitting scales.
    """
    if quantization is not None and quantization != {"method": METHOD}:
        raise CheckpointError(
            f'{config_path}: quantization is {quantization!r}, expected {{"method": "{METHOD}"}}; '
            "pass the unquantised checkpoint"
        )
    tensors: dict[str, LazyArray] = {}
    scales = {name + SCALE_SUFFIX for name, tensor in stored.items() if tensor.dtype == "I8"}
    for name, tensor in stored.items():
        if tensor.dtype == "I8" and quantization is not None:
            tensors[name] = _scaled(tensor, stored.get(name + SCALE_SUFFIX))
        elif name not in scales or quantization is None:
            integers = name in _INTEGER_TENSORS
            tensors[name] = LazyArray(name, tensor.shape, tensor.read) if integers else tensor.lazy()
    return tensors


def _scaled(tensor: StoredTensor, scale: StoredTensor | None) -> LazyArray:
    if scale is None or scale.dtype != "F32" or scale.shape != tensor.shape[:1] or len(tensor.shape) != 2:
        found = "none" if scale is None else f"{scale.dtype} {list(scale.shape)}"
        raise CheckpointError(
            f"int8 tensor {tensor.name} in {tensor.path} needs float32 scales {tensor.name}{SCALE_SUFFIX} "
            f"of shape [{tensor.shape[0] if tensor.shape else 0}], found {found}"
        )

    def load() -> Array:
        weight = tensor.read().astype(np.float32)
        weight *= scale.read()[:, None]
        return weight

    return LazyArray(tensor.name, tensor.shape, load)
