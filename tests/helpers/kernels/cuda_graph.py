"""Capturing launches into a CUDA graph and timing replays, through the driver alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from helpers.kernels.backends import CudaBackend

_CAPTURE_RELAXED = 2


class CudaGraph:
    """The launches that `record(stream)` makes, captured once."""

    def __init__(self, backend: CudaBackend, record: Callable[[int], None]) -> None:
        self._driver = backend.driver
        self._stream, graph, self._graph = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._driver.call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(1))
        self._driver.call("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_CAPTURE_RELAXED))
        record(int(self._stream.value or 0))
        self._driver.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self._driver.call("cuGraphInstantiateWithFlags", ctypes.byref(self._graph), graph, ctypes.c_ulonglong(0))

    def launch(self) -> None:
        """Replay once; returns before it has run."""
        self._driver.call("cuGraphLaunch", self._graph, self._stream)

    def times_us(self, repeats: int, between: Callable[[int], None]) -> list[float]:
        """Return the device time of each of `repeats` replays; `between(stream)` runs before each, untimed."""
        events = [ctypes.c_void_p() for _ in range(2)]
        for event in events:
            self._driver.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        times = []
        for _ in range(repeats):
            between(int(self._stream.value or 0))
            self._driver.call("cuEventRecord", events[0], self._stream)
            self.launch()
            self._driver.call("cuEventRecord", events[1], self._stream)
            self._driver.call("cuEventSynchronize", events[1])
            milliseconds = ctypes.c_float()
            self._driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), *events)
            times.append(1000 * milliseconds.value)
        return times
