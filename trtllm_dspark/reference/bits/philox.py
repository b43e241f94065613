"""Counter-based random numbers: Philox4x32-10 keyed by request seed, position, stream and block.

Source: Salmon et al. 2011; docs/core_numerics.md, section 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

_WORD = 0xFFFFFFFF


class Stream(IntEnum):
    """What a random number is used for; numbers of different streams are independent."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3
    COUPLED_TILE = 4
    COUPLED_TOKEN = 5


Words = tuple[int, int, int, int]


def philox_raw(counter: Sequence[int], key: Sequence[int]) -> Words:
    """Return Philox4x32-10 of a counter of 4 words and a key of 2."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _WORD, (low >> 32) ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def philox(seed: int, position: int, stream: int, block: int = 0) -> Words:
    """Return the four words of one (seed, position, stream, block)."""
    counter = (block, position & _WORD, ((position >> 32) & 0xFFFFFF) | stream << 24, 0)
    return philox_raw(counter, (seed & _WORD, seed >> 32))


def bits64(seed: int, position: int, stream: int, block: int = 0) -> int:
    """Return the first two words as one 64-bit number."""
    first, second, _, _ = philox(seed, position, stream, block)
    return first | second << 32


def unit53(bits: int) -> float:
    """Return the 53 high bits as a number in [0, 1)."""
    return float((bits >> 11) * 2.0**-53)
