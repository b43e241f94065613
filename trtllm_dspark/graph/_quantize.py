"""Weight quantisation: symmetric 8-bit, one scale a block of a row; one a row is the checkpoints' own format."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
# Bounds the temporaries while a vocabulary-sized matrix is quantised.
_CHUNK_ELEMENTS = 1 << 22
# The inverse of a smaller scale overflows; such weights count as zeros.
_SMALLEST_SCALE = np.finfo(np.float32).tiny


def row_chunks(weight: NDArray[np.float32]) -> Iterator[slice]:
    """Yield consecutive row slices of a matrix that hold a bounded number of elements."""
    step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        yield slice(start, min(start + step, weight.shape[0]))


def block_size_for(width: int) -> int:
    """Return the block size for rows of `width` elements.

    64 wherever it divides the row. Blocks of 128 are 6 % faster on SmolLM2 but lose 1.6 times as much (KL 0.0104
    against 0.0064 nats a token); smaller blocks serve narrow rows, and a row no size divides ends in a padded block.
    """
    for size in (64, 32, 16):
        if width % size == 0:
            return size
    return 64 if width > 32 else 32


def quantize_blocks(weight: FloatArray, block_size: int) -> tuple[NDArray[np.uint8], FloatArray]:
    """Quantise rows in blocks, symmetric around zero point 128; rows are padded with zeros to whole blocks.

    Args:
        weight: [N, K] float32.
        block_size: elements that share a scale.

    Returns:
        [N, ceil(K / block_size) * block_size] uint8 codes in 1..255 and [N, ceil(K / block_size)] float32 scales;
        value = (code - 128) * scale.
    """
    rows, width = weight.shape
    num_blocks = -(-width // block_size)
    padded = np.zeros((rows, num_blocks * block_size), np.float32)
    padded[:, :width] = weight
    blocks = padded.reshape(rows, num_blocks, block_size)
    scales = np.abs(blocks).max(axis=2) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales >= _SMALLEST_SCALE)
    blocks *= inverse[:, :, None]
    np.rint(blocks, out=blocks)
    np.clip(blocks, -127, 127, out=blocks)
    blocks += 128
    return padded.astype(np.uint8), scales
