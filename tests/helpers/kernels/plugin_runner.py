"""One plugin of a library compiled for the host, from creation to `enqueue`, with arrays by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.kernels.backends import SimtBackend
from helpers.kernels.plugin_harness import Harness, TensorArg
from trtllm_dspark.plugins import PluginSpec

NUMPY_NAMES = {"uint16": "bfloat16"}


class PluginRunner:
    """Launches plugins with arrays by the contract's names; returns the outputs the same way."""

    def __init__(self, harness: Harness, backend: SimtBackend, specs: dict[str, PluginSpec]) -> None:
        self.harness, self.backend, self.specs = harness, backend, specs

    def __call__(
        self, name: str, fields: dict[str, float], arrays: dict[str, Any], in_place: dict[str, str] | None = None
    ) -> dict[str, Any]:
        plugin, spec = self.harness.create(name, fields), self.specs[name]
        buffers = {
            key: self.backend.put(np.ascontiguousarray(array)) for key, array in arrays.items() if array is not None
        }
        inputs = [self._tensor(buffers[tensor.name]) for tensor in spec.inputs(fields)]
        symbols = [tensor.dims for tensor in spec.inputs(fields)]
        shapes = plugin.output_shapes(inputs, symbols)
        assert shapes is not None, self.harness.log()
        types = plugin.output_types(
            [
                NUMPY_NAMES.get(str(buffers[t.name].array.dtype), str(buffers[t.name].array.dtype))
                for t in spec.inputs(fields)
            ]
        )
        names = {0: np.float32, 1: np.float16, 3: np.int32, 7: np.uint16, 8: np.int64}
        results, outputs = {}, []
        for tensor, shape, code in zip(spec.outputs(fields), shapes, types, strict=True):
            dims = [int(eval(dim, {})) for dim in shape.split()]
            alias = (in_place or {}).get(tensor.name)
            results[tensor.name] = buffers[alias] if alias else self.backend.empty(dims, names[code])
            outputs.append(self._tensor(results[tensor.name]))
        assert plugin.configure(inputs, outputs) == 0, self.harness.log()
        workspace = self.backend.empty((plugin.workspace(inputs, outputs),), np.uint8)
        assert plugin.enqueue(inputs, outputs, workspace.address) == 0, self.harness.log()
        plugin.destroy()
        return {key: buffer.read() for key, buffer in results.items()}

    @staticmethod
    def _tensor(buffer: Any) -> TensorArg:
        dtype = str(buffer.array.dtype)
        return TensorArg.make(NUMPY_NAMES.get(dtype, dtype), buffer.array.shape, data=buffer.address)
