"""Which row of the core's arrays a request has."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from trtllm_dspark.engine.base import IntArray

_NOBODY: IntArray = np.zeros(0, np.int64)


class Table(Protocol):
    """Something that keeps a row of every request."""

    def reset(self, row: int) -> None:
        """Make a row that of a request of which nothing is known; it may be one more than there were."""
        ...


class RequestRows:
    """Row numbers of requests; those of requests that have ended are given out again.

    A round asks for the same requests several times, and mostly they are those of the round before: the rows of the
    batch asked for last are kept.

    Args:
        tables: what has these rows.

    Attributes:
        batch: the requests asked for last; empty when one of them may have another row by now.
        complete: whether all of them have a row.
    """

    def __init__(self, *tables: Table) -> None:
        self.batch: tuple[Hashable, ...] = ()
        self.complete = True
        self._tables = tables
        self._row: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._rows = _NOBODY

    def __len__(self) -> int:
        """Return the number of requests that are known."""
        return len(self._row)

    def row(self, request: Hashable) -> int:
        """Return the row of a request, -1 where it is not known."""
        return self._row.get(request, -1)

    def of(self, requests: Sequence[Hashable]) -> IntArray:
        """Return [R] int64 rows, -1 where a request is not known."""
        batch = tuple(requests)
        if batch != self.batch:
            self._look_up(batch)
        return self._rows

    def take(self, requests: Sequence[Hashable]) -> IntArray:
        """Return [R] int64 rows; who is not known gets one."""
        batch = tuple(requests)
        if self.complete and batch == self.batch:
            return self._rows
        for request in [request for request in batch if request not in self._row]:
            row = self._free.pop() if self._free else len(self._row)
            for table in self._tables:
                table.reset(row)
            self._row[request] = row
        self._look_up(batch)
        return self._rows

    def release(self, request: Hashable) -> None:
        """Give back the row of a request that has ended."""
        row = self._row.pop(request, None)
        if row is not None:
            self._free.append(row)
            self._forget_batch()

    def _look_up(self, batch: tuple[Hashable, ...]) -> None:
        try:
            rows = np.fromiter(map(self._row.__getitem__, batch), np.int64, len(batch))
            self.complete = True
        except KeyError:
            rows = np.array([self._row.get(request, -1) for request in batch], np.int64)
            self.complete = False
        self.batch, self._rows = batch, rows

    def _forget_batch(self) -> None:
        self.batch, self.complete, self._rows = (), True, _NOBODY
