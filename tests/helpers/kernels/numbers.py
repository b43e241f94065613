"""Element types of the kernels as numpy arrays; bfloat16 travels as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def encode(values: Array, element_type: str) -> Array:
    """Round float32 values to an element type, to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    if element_type == "float16":
        return values.astype(np.float16)
    if element_type == "bfloat16":
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)
    return values


def decode(stored: Array, element_type: str) -> Array:
    """Widen stored elements to float32."""
    if element_type == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
