"""One logit row as integer masses, and the picks from it.

Source: docs/core_numerics.md, sections 3 to 5 and 9.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.reference.bits.float32 import F32, LOG2_E, exp2, exponential
from trtllm_dspark.reference.bits.philox import Stream, philox, unit53

Masses = NDArray[np.uint64]
TILE = 1024
GREEDY_TEMPERATURE = np.float32(1e-5)

STATUS_OK, STATUS_NAN_LOGITS, STATUS_NO_FINITE_LOGITS = 0, 1, 2


def row_status(logits: F32) -> int:
    """Return why a row cannot be used, or STATUS_OK."""
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return STATUS_NAN_LOGITS
    return STATUS_NO_FINITE_LOGITS if np.isneginf(logits).all() else STATUS_OK


def is_greedy(temperature: float) -> bool:
    """Return whether this temperature means argmax."""
    return bool(np.float32(temperature) < GREEDY_TEMPERATURE)


def total(masses: Masses) -> int:
    """Return the exact sum."""
    return int(masses.sum(dtype=np.uint64))


def row_masses(logits: F32, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Masses:
    """Return [V] uint64 masses in Q.40 of the largest; 0 where the filters drop a token."""
    scale = LOG2_E / np.float32(temperature)
    with np.errstate(over="ignore"):
        z = np.maximum((logits - logits.max()) * scale, np.float32(-64))
    masses = np.rint(exp2(z) * np.float32(2.0**40)).astype(np.uint64)
    return np.where(logits >= _pivot(logits, masses, top_k, top_p), masses, np.uint64(0))


def _pivot(logits: F32, masses: Masses, top_k: int, top_p: float) -> float:
    pivot = -math.inf
    if 0 < top_k < len(logits):
        pivot = float(np.sort(logits)[-top_k])
    if np.float32(top_p) < 1:
        kept = np.where(logits >= pivot, masses, np.uint64(0))
        whole = total(kept)
        need = max(1, min(whole, math.ceil(float(np.float32(top_p)) * float(whole))))
        reached = 0
        for value in np.unique(logits[logits >= pivot])[::-1]:
            reached += total(kept[logits == value])
            if reached >= need:
                return float(value)
    return pivot


def pick(masses: Masses, bits: int) -> int:
    """Return the lowest id whose inclusive prefix sum exceeds floor(bits * W / 2^64); -1 when all are 0."""
    whole = total(masses)
    if whole == 0:
        return -1
    target = (bits * whole) >> 64
    return int(np.searchsorted(np.cumsum(masses, dtype=np.uint64), np.uint64(target), side="right"))


def accept_test(bits: int, target_mass: int, target_total: int, draft_mass: int, draft_total: int) -> bool:
    """Return whether u * q < p, in binary64."""
    return unit53(bits) * (float(draft_mass) / float(draft_total)) < float(target_mass) / float(target_total)


def residual_masses(target: Masses, draft: Masses) -> Masses:
    """Return max(P - Q, 0) of both rows brought to a sum of 2^51."""
    shares = []
    for row in (target, draft):
        scale = 2.0**51 / float(total(row))
        shares.append(np.rint(row.astype(np.float64) * scale).astype(np.int64))
    return np.asarray(np.maximum(shares[0] - shares[1], 0), np.uint64)


def coupled_pick(masses: Masses, seed: int, position: int) -> int:
    """Return the winner of the two-level race: the tile first, then the token inside it; -1 when all are 0."""
    sums = [total(masses[start : start + TILE]) for start in range(0, len(masses), TILE)]
    tile = _race(sums, 0, seed, position, Stream.COUPLED_TILE)
    if tile < 0:
        return -1
    inside = masses[tile * TILE : (tile + 1) * TILE].tolist()
    return tile * TILE + _race(inside, tile * TILE, seed, position, Stream.COUPLED_TOKEN)


def _race(masses: list[int], first_id: int, seed: int, position: int, stream: Stream) -> int:
    """Return the offset with the smallest exponential / mass among the positive ones, lowest on ties."""
    runners = [offset for offset, mass in enumerate(masses) if mass]
    if not runners:
        return -1
    words = [philox(seed, position, stream, (first_id + n) >> 2)[(first_id + n) & 3] for n in runners]
    finish = exponential(np.array(words)).astype(np.float64) / np.array([float(masses[n]) for n in runners])
    return runners[int(np.argmin(finish))]
