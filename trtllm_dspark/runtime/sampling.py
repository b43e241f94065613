"""Sampling parameters of a batch in the core's form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.runtime.active import ActiveRequest


class SamplingCache:
    """Keep the `Sampling` of the last batch: batches change when requests come and go, not every round."""

    def __init__(self) -> None:
        self._requests: tuple[ActiveRequest, ...] = ()
        self._sampling: _core.Sampling | None = None

    def get(self, requests: Sequence[ActiveRequest]) -> _core.Sampling:
        """Return the parameters of these requests, row by row."""
        key = tuple(requests)
        if self._sampling is None or key != self._requests:
            self._requests, self._sampling = key, _build(key)
        return self._sampling


def _build(requests: tuple[ActiveRequest, ...]) -> _core.Sampling:
    params = [request.params for request in requests]
    return _core.Sampling(
        np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
        np.array([request.seed for request in requests], np.uint64),
        np.array([p.top_k for p in params], np.int64) if any(p.top_k for p in params) else None,
        np.array([p.top_p for p in params], np.float32) if any(p.top_p < 1 for p in params) else None,
    )
