"""What both ways to TensorRT have in common."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from trtllm_dspark.graph.matrices import WeightDtype
from trtllm_dspark.graph.network import FLOAT_DTYPES, Network
from trtllm_dspark.graph.weight_only import WEIGHT_ONLY

DtypeName = Literal["float16", "bfloat16", "float32"]


class TensorRtLowering:
    """Types and norms of a graph that TensorRT's parser reads; subclasses hold `dtype_name`."""

    __slots__ = ()
    dtype_name: DtypeName

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of activations and caches."""
        return FLOAT_DTYPES[self.dtype_name]

    @property
    def weight_dtypes(self) -> tuple[WeightDtype, ...]:
        """Formats of linear layers it can be combined with."""
        return (self.dtype_name, *WEIGHT_ONLY)

    def add_norm(self, net: Network, x: str, change: str, scale: str, epsilon: float) -> tuple[str, str]:
        """Append Add and RMSNormalization; the builder fuses them."""
        total = net.node("Add", x, change)
        return total, net.node("RMSNormalization", total, scale, axis=-1, epsilon=epsilon, stash_type=1)
