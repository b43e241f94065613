"""Pearson's test of observed counts against an exact law."""

from __future__ import annotations

import numpy as np
from scipy.stats import chi2


def chi_square_p(counts: np.ndarray, law: np.ndarray, min_expected: float = 10.0) -> float:
    """Return the p-value of counts under a law; cells expected fewer than `min_expected` times count as one.

    A count in a cell of probability zero gives 0.
    """
    counts, law = counts.ravel(), law.ravel()
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    small = expected < min_expected
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < min_expected:  # the rest is too rare to be a cell of its own
        observed, expected = observed[:-1], expected[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, len(observed) - 1))


def count_tuples(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Return [V] * n counts of the rows of tokens [samples, n]."""
    counts = np.zeros((vocab,) * tokens.shape[1], np.int64)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts
