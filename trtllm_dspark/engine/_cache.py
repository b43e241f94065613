"""Key and value caches of one network: a slot a row, updated in place by the passes."""

from __future__ import annotations

import math

import numpy as np

from trtllm_dspark.engine.base import FloatArray
from trtllm_dspark.errors import DeviceError
from trtllm_dspark.graph import CACHE_MULTIPLE


class KvCache:
    """`[num_slots, Hkv, C, D]` float32 arrays, K and V of each layer.

    Zero-filled, because whatever lies behind a row's end must be finite. The zeros are the operating system's: pages
    that no request reached are never resident, so idle slots and unused lengths cost nothing.
    """

    def __init__(self, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, length: int) -> None:
        """Allocate caches of at least `length` tokens a slot.

        Raises:
            DeviceError: the machine has no room for them.
        """
        self.length = -(-length // CACHE_MULTIPLE) * CACHE_MULTIPLE
        shape = (num_slots, num_kv_heads, self.length, head_dim)
        names = [f"{kind}.{layer}" for layer in range(num_layers) for kind in "kv"]
        try:
            self.arrays: dict[str, FloatArray] = {name: np.zeros(shape, np.float32) for name in names}
        except MemoryError as error:
            size = len(names) * 4 * math.prod(shape)
            raise DeviceError(
                f"not enough memory for caches of {size / 1e9:.1f} GB; build with a smaller --max_batch_size, "
                "--max_seq_len or --max_num_tokens"
            ) from error

    def copy_slot(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of one slot to another."""
        for array in self.arrays.values():
            array[destination, :, :num_tokens] = array[source, :, :num_tokens]
