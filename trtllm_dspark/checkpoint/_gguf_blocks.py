"""Dequantisation of ggml's block formats.

A quantised row is a run of blocks; each block holds the scale(s) of its weights and their packed integers.
The layouts are those of ggml's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One storage type of a GGUF tensor."""

    name: str
    block_size: int
    """Weights of a block."""
    block_bytes: int
    decode: Callable[[Bytes], Float]
    """[num_blocks, block_bytes] uint8 -> [num_blocks, block_size] float32."""


def dequantise(block_format: BlockFormat, raw: Bytes, shape: tuple[int, ...]) -> Float:
    """Return the weights of a tensor as float32 of `shape`.

    Args:
        block_format: how `raw` is stored.
        raw: the tensor's bytes, uint8 [num_blocks * block_bytes].
        shape: shape of the tensor, last dimension fastest.

    Works in pieces, so that the temporaries stay small beside the result.
    """
    blocks = raw.reshape(-1, block_format.block_bytes)
    result = np.empty((blocks.shape[0], block_format.block_size), np.float32)
    step = max(1, _CHUNK_BYTES // block_format.block_bytes)
    for start in range(0, blocks.shape[0], step):
        result[start : start + step] = block_format.decode(blocks[start : start + step])
    return result.reshape(shape)


def _half(blocks: Bytes, offset: int) -> Float:
    """Return the float16 at byte `offset` of every block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return the low halves of all bytes, then the high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(blocks: Bytes, offset: int) -> Bytes:
    """Return the 32 fifth bits stored at byte `offset` of every block, already shifted to 0x10."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, offset : offset + 4]), axis=1, bitorder="little")
    return np.left_shift(bits, 4, dtype=np.uint8)


def _f32(blocks: Bytes) -> Float:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32, copy=False)


def _f16(blocks: Bytes) -> Float:
    return _half(blocks, 0)


def _bf16(blocks: Bytes) -> Float:
    words = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    return (words << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Float:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8.0)


def _q4_1(blocks: Bytes) -> Float:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Float:
    values = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32)
    return _half(blocks, 0) * (values - 16.0)


def _q5_1(blocks: Bytes) -> Float:
    values = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).astype(np.float32)
    return _half(blocks, 0) * values + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Float:
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _six_bit_scales(packed: Bytes) -> tuple[Float, Float]:
    """Unpack the 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima, each [num_blocks, 8]."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_affine(blocks: Bytes, values: Bytes) -> Float:
    """Apply the two-level scales of Q4_K and Q5_K to integers [num_blocks, 8, 32]."""
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales)[:, :, None]
    offset = (_half(blocks, 2) * minima)[:, :, None]
    return (scale * values.astype(np.float32) - offset).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Float:
    packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=2)
    return _k_affine(blocks, values.reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Float:
    packed = blocks[:, 48:].reshape(-1, 4, 1, 32)
    low = np.concatenate([packed & 0x0F, packed >> 4], axis=2).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high = np.bitwise_and(blocks[:, None, 16:48] >> shifts, 1, dtype=np.uint8)
    return _k_affine(blocks, low | (high << 4))


def _q6_k(blocks: Bytes) -> Float:
    packed = blocks[:, :128].reshape(-1, 2, 2, 32)
    low = np.stack([packed & 0x0F, packed >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).astype(np.float32).reshape(-1, 16, 16) - 32.0
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    weights: Float = (_half(blocks, 208) * scales)[:, :, None] * values
    return weights.reshape(-1, 256)


BLOCK_FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
"""ggml type number -> storage format, for the types this package reads."""
