"""Checkpoint arrays on their way into a graph: read, fused, quantised, stored one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.errors import ShapeError
from trtllm_dspark.graph._quantize import FloatArray
from trtllm_dspark.graph.matrices import StoredMatrix, WeightDtype, store_matrix
from trtllm_dspark.graph.network import FLOAT_DTYPES, Network
from trtllm_dspark.graph.weight_only import WEIGHT_ONLY, store_weight_only

Arrays = Mapping[str, FloatArray]
Progress = Callable[[str], None]
"""Called with the name of each weight after it is stored."""


@dataclass(slots=True)
class Weights:
    """Arrays of one checkpoint and how to store them; a graph of two models gives the names of one a `prefix`."""

    arrays: Arrays
    dtype: WeightDtype
    progress: Progress | None = None
    prefix: str = ""

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> FloatArray:
        """Return one array as float32, checked against `shape`.

        Raises:
            ShapeError: it is missing or has another shape.
        """
        if name not in self.arrays:
            raise ShapeError(f"the checkpoint has no tensor {name!r}; check that it belongs to this architecture")
        value = np.asarray(self.arrays[name], np.float32)
        if shape is not None and value.shape != shape:
            raise ShapeError(
                f"tensor {name!r} has shape {value.shape}, the configuration needs {shape}; check the checkpoint"
            )
        return value

    def linear(
        self,
        net: Network,
        x: str,
        sources: Sequence[str],
        shapes: Sequence[int],
        width: int,
        *,
        dtype: WeightDtype | None = None,
        factor: float = 1.0,
    ) -> str:
        """Append one fused linear layer over `{source}.weight` (and `{source}.bias` where present), stacked by rows.

        Args:
            net: the graph.
            x: [T, width] value.
            sources: canonical names without suffix.
            shapes: rows of each source.
            width: columns of all of them.
            dtype: storage in place of this object's.
            factor: multiplies weights and biases before they are stored.
        """
        parts = [self.read(f"{s}.weight", (rows, width)) for s, rows in zip(sources, shapes, strict=True)]
        name = f"{sources[0]}.weight" if len(sources) == 1 else f"{sources[0]}+{len(sources) - 1}.weight"
        weight = parts[0] if len(parts) == 1 else np.concatenate(parts)
        y = self.store(net, name, _scaled(weight, factor), dtype).multiply(net, x)
        if any(f"{s}.bias" in self.arrays for s in sources):
            biases = [
                self.read(f"{s}.bias", (rows,)) if f"{s}.bias" in self.arrays else np.zeros(rows, np.float32)
                for s, rows in zip(sources, shapes, strict=True)
            ]
            bias = _scaled(np.concatenate(biases), factor).astype(FLOAT_DTYPES.get(dtype or self.dtype, net.dtype))
            y = net.node("Add", y, net.weight(f"{self.prefix}{name[:-7]}.bias", bias))
        return y

    def store(self, net: Network, name: str, weight: FloatArray, dtype: WeightDtype | None = None) -> StoredMatrix:
        """Store a matrix in the graph's data file, in `dtype` or this object's."""
        name = self.prefix + name
        chosen = dtype or self.dtype
        matrix: StoredMatrix
        if chosen in WEIGHT_ONLY:
            matrix = store_weight_only(net.weights, name, weight, chosen, net.dtype)
        else:
            matrix = store_matrix(net.weights, name, weight, chosen)
        if self.progress is not None:
            self.progress(name)
        return matrix

    def norm_weight(self, net: Network, name: str, size: int, factor: float = 1.0) -> str:
        """Store the norm weight `{name}.weight` [size] times `factor` in the graph's type and return its name."""
        weight = _scaled(self.read(f"{name}.weight", (size,)), factor)
        return net.weight(f"{self.prefix}{name}.weight", weight.astype(net.dtype))

    def norm(self, net: Network, x: str, name: str, size: int, epsilon: float, factor: float = 1.0) -> str:
        """Append an RMSNorm over the last axis with the weight `{name}.weight` [size] times `factor`."""
        scale = self.norm_weight(net, name, size, factor)
        return net.node("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)


def _scaled(value: FloatArray, factor: float) -> FloatArray:
    return value if factor == 1.0 else value * np.float32(factor)
