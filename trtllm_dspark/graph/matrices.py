"""Stored weight matrices: how each `--weight_dtype` lies in the data file and multiplies on ONNX Runtime.

Every spelling gives the same bits for a row whatever other rows share the pass: scales are per row of activations or
per block of it, never per tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.int8_rows import quantise_rows
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph._quantize import FloatArray, block_size_for, quantize_blocks, row_chunks
from trtllm_dspark.graph.network import FLOAT_DTYPES, MICROSOFT, Network, StoredTensor, WeightFile

WeightDtype = Literal["int8", "float32", "w8a8", "float16", "bfloat16", "w8a16", "w4a16", "fp8"]
WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("int8", "float32", "w8a8")
"""Formats of the ONNX Runtime lowering; it computes in float32."""
FLOAT_NAMES: dict[np.dtype[Any], WeightDtype] = {
    FLOAT_DTYPES["float32"]: "float32",
    FLOAT_DTYPES["float16"]: "float16",
    FLOAT_DTYPES["bfloat16"]: "bfloat16",
}


@dataclass(frozen=True, slots=True)
class StoredMatrix(ABC):
    """A matrix [N, K] in a data file; a graph in the same directory may refer to it."""

    name: str
    rows: int
    width: int

    @abstractmethod
    def multiply(self, net: Network, x: str) -> str:
        """Append x [T, K] times the transposed matrix and return the [T, N] value."""

    @abstractmethod
    def gather(self, net: Network, ids: str) -> str:
        """Append the look-up of rows `ids` [...] and return the [..., K] value."""


@dataclass(frozen=True, slots=True)
class FloatMatrix(StoredMatrix):
    """Floating-point [N, K], as in the checkpoint; a tied head multiplies the very bytes the embedding reads."""

    values: StoredTensor

    def multiply(self, net: Network, x: str) -> str:
        """Append a Gemm on the untransposed weight."""
        return net.node("Gemm", x, net.stored(self.name, self.values), transB=1)

    def gather(self, net: Network, ids: str) -> str:
        """Append a Gather."""
        return net.node("Gather", net.stored(self.name, self.values), ids, axis=0)


@dataclass(frozen=True, slots=True)
class BlockInt8Matrix(StoredMatrix):
    """uint8 codes [N, whole blocks] with one scale a block; head and embedding read the same bytes."""

    codes: StoredTensor
    scales: StoredTensor

    @property
    def block_size(self) -> int:
        """Elements that share a scale; the last block of a row may reach beyond it, into zeros."""
        return self.codes.shape[1] // self.scales.shape[1]

    def multiply(self, net: Network, x: str) -> str:
        """Append a MatMulNBits that also rounds activations to 8 bits a block (accuracy level 4)."""
        blocks = self.scales.shape[1]
        codes = self.codes.reshaped((self.rows, blocks, self.block_size))
        return net.node(
            "MatMulNBits",
            x,
            net.stored(f"{self.name}/codes", codes),
            net.stored(f"{self.name}/scales", self.scales),
            domain=MICROSOFT,
            K=self.width,
            N=self.rows,
            bits=8,
            block_size=self.block_size,
            accuracy_level=4,
        )

    def gather(self, net: Network, ids: str) -> str:
        """Append a look-up that dequantises only the rows it reads."""
        rows = net.node(
            "GatherBlockQuantized",
            net.stored(f"{self.name}/rows", self.codes),
            ids,
            net.stored(f"{self.name}/scales", self.scales),
            domain=MICROSOFT,
            gather_axis=0,
            quantize_axis=1,
            block_size=self.block_size,
            bits=8,
        )
        if self.codes.shape[1] == self.width:
            return rows
        return net.node("Slice", rows, net.ints(0), net.ints(self.width), net.ints(-1))


@dataclass(frozen=True, slots=True)
class RowInt8Matrix(StoredMatrix):
    """uint8 codes [K, N] around 128 with one scale a row of the matrix; activations are rounded to 8 bits a token.

    Both factors are unsigned: on processors without VNNI, ONNX Runtime's product of uint8 and int8 saturates sums of
    two products at 16 bits without an error.
    """

    codes: StoredTensor
    scales: StoredTensor

    def multiply(self, net: Network, x: str) -> str:
        """Append MatMulInteger between per-token uint8 activations and the weight."""
        peak = net.node("ReduceMax", net.node("Abs", x), net.ints(-1), keepdims=1)
        # A row of zeros has no scale of its own; any positive one gives zeros.
        scale = net.node("Max", net.node("Mul", peak, net.scalar(1 / 127)), net.scalar(1e-30))
        rounded = net.node("Round", net.node("Div", x, scale))
        codes = net.node("Cast", net.node("Add", rounded, net.scalar(128.0)), to=2)
        zero = net.constant(np.array(128, np.uint8))
        product = net.node("MatMulInteger", codes, net.stored(f"{self.name}/codes", self.codes), zero, zero)
        wide = net.node("Cast", product, to=1)
        return net.node("Mul", net.node("Mul", wide, scale), net.stored(f"{self.name}/scales", self.scales))

    def gather(self, net: Network, ids: str) -> str:
        """Row scales are stored for multiplication only."""
        raise NotImplementedError("embeddings are stored with one scale a block, see embedding_dtype")


def embedding_dtype(weight_dtype: WeightDtype, float_dtype: np.dtype[Any]) -> WeightDtype:
    """Return how the embedding and the head are stored: the head loses too much with one scale a row.

    Weight-only formats leave both in the graph's float type: a tied table is stored once and looked up by row.
    """
    if weight_dtype in ("w8a16", "w4a16", "fp8"):
        return FLOAT_NAMES[float_dtype]
    return "int8" if weight_dtype == "w8a8" else weight_dtype


def store_matrix(file: WeightFile, name: str, weight: FloatArray, weight_dtype: WeightDtype) -> StoredMatrix:
    """Quantise a matrix [N, K] and append it to the data file.

    Raises:
        ConfigError: a weight does not fit `weight_dtype`.
    """
    rows, width = weight.shape
    if weight_dtype in FLOAT_DTYPES:
        if weight_dtype == "float16" and np.abs(weight).max(initial=0) > np.finfo(np.float16).max:
            raise ConfigError(f"tensor {name!r} exceeds the range of float16; use bfloat16")
        return FloatMatrix(name, rows, width, file.append(name, [weight], weight.shape, FLOAT_DTYPES[weight_dtype]))
    if weight_dtype == "w8a8":
        codes, scales = quantise_rows(weight)
        unsigned = (codes.view(np.uint8) ^ np.uint8(128)).T
        stored = file.append(f"{name}/codes", [unsigned], (width, rows), np.uint8)
        return RowInt8Matrix(name, rows, width, stored, file.append(f"{name}/scales", [scales], (rows,), np.float32))
    block = block_size_for(width)
    blocks = -(-width // block)
    all_scales = np.empty((rows, blocks), np.float32)

    def chunks() -> Iterator[NDArray[np.uint8]]:
        for part in row_chunks(weight):
            block_codes, all_scales[part] = quantize_blocks(weight[part], block)
            yield block_codes

    stored = file.append(f"{name}/codes", chunks(), (rows, blocks * block), np.uint8)
    return BlockInt8Matrix(
        name, rows, width, stored, file.append(f"{name}/scales", [all_scales], all_scales.shape, np.float32)
    )
