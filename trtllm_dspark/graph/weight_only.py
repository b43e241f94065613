"""Weight-only matrices for TensorRT: few bits in the plan, dequantised inside the matrix product's kernel.

A DequantizeLinear on a constant in front of a Gemm is what the builder fuses with it; activations keep the graph's
type. Formats: `w8a16` int8 with one scale a row, `w4a16` int4 with one scale a block of a row, `fp8` float8 e4m3 with
one scale a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph._quantize import FloatArray, row_chunks
from trtllm_dspark.graph.matrices import StoredMatrix, WeightDtype
from trtllm_dspark.graph.network import Network, StoredTensor, WeightFile

WEIGHT_ONLY: tuple[WeightDtype, ...] = ("w8a16", "w4a16", "fp8")
"""Formats of the TensorRT lowerings beside their own float type."""
_LARGEST = {"w8a16": 127.0, "w4a16": 7.0, "fp8": 448.0}
_STORED: dict[str, np.dtype[Any]] = {
    "w8a16": np.dtype(np.int8),
    "w4a16": np.dtype(ml_dtypes.int4),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
_INT4_BLOCKS = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class DequantizedMatrix(StoredMatrix):
    """Codes [N, K] and scales [N] or, where `block_size` is set, [N, K / block_size]."""

    codes: StoredTensor
    scales: StoredTensor
    block_size: int

    def multiply(self, net: Network, x: str) -> str:
        """Append the dequantisation and a Gemm on the untransposed weight."""
        blocks: dict[str, Any] = {"axis": 1, "block_size": self.block_size} if self.block_size else {"axis": 0}
        stored = (net.stored(f"{self.name}/codes", self.codes), net.stored(f"{self.name}/scales", self.scales))
        return net.node("Gemm", x, net.node("DequantizeLinear", *stored, **blocks), transB=1)

    def gather(self, net: Network, ids: str) -> str:
        """Embeddings keep the graph's float type."""
        raise NotImplementedError("embeddings are stored in the graph's float type, see embedding_dtype")


def store_weight_only(
    file: WeightFile, name: str, weight: FloatArray, weight_dtype: WeightDtype, float_dtype: np.dtype[Any]
) -> DequantizedMatrix:
    """Quantise a matrix [N, K], symmetric, and append it to the data file.

    Args:
        file: data file of the graph.
        name: name of the matrix.
        weight: [N, K] float32.
        weight_dtype: one of `WEIGHT_ONLY`.
        float_dtype: type of the scales, which is the type the graph computes in.

    Raises:
        ConfigError: no int4 block divides the rows.
    """
    rows, width = weight.shape
    block = _int4_block(name, width) if weight_dtype == "w4a16" else 0
    group = block or width
    scales = np.empty((rows, width // group), float_dtype)

    def chunks() -> Iterator[NDArray[Any]]:
        for part in row_chunks(weight):
            groups = weight[part].reshape(-1, width // group, group)
            codes, scales[part] = _quantize(groups, weight_dtype, float_dtype)
            yield _pack_int4(codes.reshape(-1, width)) if block else codes.reshape(-1, width).view(np.uint8)

    stored = file.append(f"{name}/codes", chunks(), (rows, width // 2 if block else width), np.uint8)
    codes = StoredTensor(stored.location, stored.offset, stored.length, _STORED[weight_dtype], (rows, width))
    shape = (rows, width // group) if block else (rows,)
    return DequantizedMatrix(
        name, rows, width, codes, file.append(f"{name}/scales", [scales.reshape(shape)], shape, float_dtype), block
    )


def _int4_block(name: str, width: int) -> int:
    for size in _INT4_BLOCKS:
        if width % size == 0:
            return size
    raise ConfigError(f"rows of {width} weights of {name!r} are no multiple of 32, the smallest int4 block; use int8")


def _quantize(groups: FloatArray, weight_dtype: WeightDtype, float_dtype: np.dtype[Any]) -> tuple[NDArray[Any], Any]:
    """Quantise groups [n, G, group] with one scale each; codes are for the scale as it is stored."""
    largest = _LARGEST[weight_dtype]
    scales = (np.abs(groups).max(axis=2) / np.float32(largest)).astype(float_dtype)
    wide = scales.astype(np.float32)[:, :, None]
    # Weights too small for a scale of this type count as zeros.
    values = np.divide(groups, wide, out=np.zeros_like(groups), where=wide > 0)
    np.clip(values, -largest, largest, out=values)
    if weight_dtype == "fp8":
        return values.astype(ml_dtypes.float8_e4m3fn), scales
    return np.rint(values).astype(np.int8), scales


def _pack_int4(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack two codes a byte, the first in the low half, as ONNX stores INT4."""
    halves = codes.view(np.uint8) & np.uint8(0x0F)
    return np.bitwise_or(halves[:, 0::2], np.left_shift(halves[:, 1::2], np.uint8(4)))
