"""One ONNX Runtime session with its caches bound in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native

from trtllm_dspark.engine._cache import KvCache
from trtllm_dspark.errors import DeviceError, EngineError

MAX_BINDINGS = 64
"""Slot ranges whose bindings are kept. Those of ten slots all fit, 64 slots have 2,080. A binding of 30 layers takes
0.7 ms to make and 45 KiB to keep (SmolLM2-135M, one thread of a busy Intel Xeon, 2026-11-30)."""


class CachedSession:
    """A session whose past_/present_ tensors are a slot range of a `KvCache`.

    Input and output of a cache are bound to the same address: ONNX Runtime then updates it in place.
    """

    def __init__(self, path: Path, cache: KvCache, *, num_threads: int) -> None:
        """Load a graph.

        Raises:
            EngineError: ONNX Runtime refuses the graph.
        """
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        # Shapes differ from pass to pass: a pattern per shape would only cost memory.
        options.enable_mem_pattern = False
        # Several sessions share the cores: the default of 1 ms of spinning takes them from the next one (a round of
        # 11 ms becomes 26 ms), none at all costs a wake-up an operator (13 ms).
        options.add_session_config_entry("session.intra_op.spin_duration_us", "20")
        try:
            self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises its own types, all derived from Exception only
            if "bad_alloc" in str(error):
                raise DeviceError(f"not enough memory to load {path}; free some") from error
            raise EngineError(
                f"ONNX Runtime cannot load {path}: {_first_line(error)}; build the engine again"
            ) from error
        self._cache = cache
        self._bindings: dict[tuple[int, int], Any] = {}
        self._cpu = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)
        names = {entry.name for entry in self._session.get_inputs()}
        self._cache_names = [name for name in cache.arrays if f"past_{name}" in names]
        self._run_options = ort.RunOptions()

    def run(
        self,
        first_slot: int,
        num_rows: int,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
    ) -> None:
        """Run the graph on slots `first_slot` .. `first_slot + num_rows - 1`.

        Args:
            first_slot: slot of row 0.
            num_rows: R.
            inputs: every graph input but the caches, C-contiguous.
            outputs: C-contiguous arrays that receive the graph's outputs.

        Raises:
            DeviceError: ONNX Runtime fails.
        """
        binding = self._binding(first_slot, num_rows)
        for name, value in inputs.items():
            binding.bind_input(name, self._cpu, value.dtype, value.shape, value.ctypes.data)
        for name, value in outputs.items():
            binding.bind_output(name, self._cpu, value.dtype, value.shape, value.ctypes.data)
        try:
            self._session._sess.run_with_iobinding(binding, self._run_options)
        except Exception as error:
            raise DeviceError(f"ONNX Runtime failed while running a pass: {_first_line(error)}") from error

    def _binding(self, first_slot: int, num_rows: int) -> Any:
        """Return the binding of a slot range, kept: naming four tensors a layer costs more than the rest of a call."""
        # Taken out and put back, so that the first one is the one unused for longest.
        binding = self._bindings.pop((first_slot, num_rows), None)
        if binding is None:
            binding = native.SessionIOBinding(self._session._sess)
            for name in self._cache_names:
                rows = self._cache.arrays[name][first_slot : first_slot + num_rows]
                for bind, prefix in ((binding.bind_input, "past"), (binding.bind_output, "present")):
                    bind(f"{prefix}_{name}", self._cpu, np.float32, rows.shape, rows.ctypes.data)
            while len(self._bindings) >= MAX_BINDINGS:
                del self._bindings[next(iter(self._bindings))]
        self._bindings[first_slot, num_rows] = binding
        return binding

    def close(self) -> None:
        """Release the session."""
        self._bindings.clear()
        del self._session


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
