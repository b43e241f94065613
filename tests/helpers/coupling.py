"""The joint law of two exponential races that share their noise, integrated analytically."""

from __future__ import annotations

import numpy as np


def joint_law(draft: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return [V, V]: probability that token i minimises E / draft while token j minimises E / target, E shared.

    For i = j every other exponential must exceed E_i max(q_k / q_i, p_k / p_i). For i != j put E_i = ratio * E_j: the
    two wins confine the ratio to [p_i / p_j, q_i / q_j], and integrating E_j and the others leaves
    1 / (1 + ratio + sum_k max(ratio q_k / q_i, p_k / p_j))^2, piecewise rational in the ratio.
    """
    size = len(draft)
    joint = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            if draft[i] <= 0 or target[j] <= 0:
                continue
            others = [k for k in range(size) if k not in (i, j)]
            slopes = [draft[k] / draft[i] for k in others]
            floors = [target[k] / target[j] for k in others]
            if i == j:
                joint[i, i] = 1 / (1 + sum(max(s, f) for s, f in zip(slopes, floors, strict=True)))
                continue
            low = target[i] / target[j]
            high = draft[i] / draft[j] if draft[j] > 0 else np.inf
            turns = [f / s for s, f in zip(slopes, floors, strict=True) if s > 0]
            edges = [low, *sorted(t for t in turns if low < t < high), high]
            for start, end in zip(edges, edges[1:], strict=False):
                if end <= start:
                    continue
                middle = 2 * start + 1 if np.isinf(end) else (start + end) / 2
                rising = [s for s, f in zip(slopes, floors, strict=True) if s * middle > f]
                level = [f for s, f in zip(slopes, floors, strict=True) if s * middle <= f]
                slope, constant = 1 + sum(rising), 1 + sum(level)
                joint[i, j] += (1 / (constant + slope * start) - 1 / (constant + slope * end)) / slope
    return joint
