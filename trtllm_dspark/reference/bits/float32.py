"""Pinned binary32 arithmetic: fma, exp2, exponential variates, sigmoid, tanh, 16-lane dots.

Source: docs/core_numerics.md, sections 2 and 6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
_EXP2 = ("0x1p0", "0x1.62e43p-1", "0x1.ebfbdcp-3", "0x1.c6aee8p-5", "0x1.3b2d4ap-7", "0x1.5f3e2cp-10", "0x1.41fd02p-13")
_LOG2 = ("0x1.715476p+1", "0x1.ec6ff4p-1", "0x1.27a5ep-1", "0x1.9d1148p-2", "0x1.a048bcp-2")


def number(text: str) -> np.float32:
    """Return the binary32 number of a hexadecimal literal."""
    return np.float32(float.fromhex(text))


LOG2_E = number("0x1.715476p0")


def fma32(a: Any, b: Any, c: Any) -> F32:
    """Return the correctly rounded a * b + c of binary32 arrays.

    The product is exact in binary64. Rounding the sum to odd keeps the information that the second rounding, to
    binary32, needs: 53 >= 2 * 24 + 2 bits.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.uint64) & np.uint64(1)) == 0
        inexact = np.isfinite(total) & (error != 0)
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.asarray(np.where(inexact & even, odd, total).astype(np.float32))


def exp2(x: Any) -> F32:
    """Return 2^x of binary32 arrays, |x| <= 126; NaN gives NaN."""
    x = np.asarray(x, np.float32)
    magic = number("0x1.8p23")
    whole = np.asarray((x + magic) - magic, np.float32)
    rest = np.asarray(x - whole, np.float32)
    y = np.full(x.shape, number(_EXP2[-1]), np.float32)
    for text in reversed(_EXP2[:-1]):
        y = fma32(y, rest, number(text))
    shift = np.where(np.isnan(x), 0, whole).astype(np.int32) << np.int32(23)
    return np.asarray((y.view(np.int32) + shift).view(np.float32))


def exponential(words: Any) -> F32:
    """Return -log2(1 - (U + 1/2) 2^-32) of uint32 words U: exponential variates in units of ln 2."""
    u = np.asarray(words, np.uint64)
    small = u < 2**31
    one, two = np.float32(1), np.float32(2)

    x = (np.where(small, 2 * u + 1, 1)).astype(np.float32) * np.float32(2.0**-33)
    s_small = x / (two - x)

    y = np.where(small, 1, 2 * (2**32 - 1 - u) + 1).astype(np.float32) * np.float32(2.0**-33)
    exponent = (y.view(np.int32) >> 23) - 127
    mantissa = ((y.view(np.int32) & 0x7FFFFF) | 0x3F800000).view(np.float32)
    high = mantissa > number("0x1.6a09e6p0")
    mantissa = np.where(high, mantissa * np.float32(0.5), mantissa)
    exponent = exponent + high
    s_large = (one - mantissa) / (one + mantissa)

    s = np.where(small, s_small, s_large)
    e = np.where(small, 0, -exponent).astype(np.float32)
    t = s * s
    p = np.full(s.shape, number(_LOG2[-1]), np.float32)
    for text in reversed(_LOG2[:-1]):
        p = fma32(p, t, number(text))
    return fma32(s, p, e)


def sigmoid(z: Any) -> F32:
    """Return the pinned logistic function of a binary32 array."""
    z = np.asarray(z, np.float32)
    with np.errstate(over="ignore"):
        a = np.clip(z * -LOG2_E, np.float32(-126), np.float32(126))
    return np.asarray(np.float32(1) / (np.float32(1) + exp2(a)))


def tanh(z: Any) -> F32:
    """Return the pinned hyperbolic tangent of a binary32 array."""
    with np.errstate(over="ignore"):
        doubled = np.float32(2) * np.asarray(z, np.float32)
    return fma32(np.float32(2), sigmoid(doubled), np.float32(-1))


def dot16(a: Any, b: Any) -> F32:
    """Return the pinned dot products of a [..., n] with b [n]: 16 lanes, folded by halves."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    lanes = np.zeros((*a.shape[:-1], 16), np.float32)
    for start in range(0, a.shape[-1], 16):
        part = a[..., start : start + 16]
        width = part.shape[-1]
        lanes[..., :width] = fma32(part, b[start : start + 16], lanes[..., :width])
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return np.asarray(lanes[..., 0])


def dot_in_order(latent: F32, matrix: F32) -> F32:
    """Return matrix [n, r] times latent [r] as one chain of fma over the rank."""
    acc = np.zeros(len(matrix), np.float32)
    for i in range(matrix.shape[1]):
        acc = fma32(latent[i], matrix[:, i], acc)
    return acc
