"""Run graphs meant for TensorRT on ONNX Runtime: TRT_Attention becomes a function of standard operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

Arrays = dict[str, np.ndarray]


def attention_function(causal_kind: str) -> onnx.FunctionProto:
    """Return TRT_Attention(q, k, v, mask, query_lengths, kv_lengths) with scale 1.

    Key j is visible to query s of S when j <= length - S + s (`lower_right`) or j < length (`none`).
    """

    def constant(name: str, value: object) -> onnx.NodeProto:
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value, np.int64)))

    nodes = [
        constant("zero", 0),
        constant("one", 1),
        constant("last", [1, 2, 3]),
        constant("row", [0, 1, 3]),
        helper.make_node("Shape", ["k"], ["c1"], start=2, end=3),
        helper.make_node("Shape", ["q"], ["s1"], start=2, end=3),
        helper.make_node("Squeeze", ["c1"], ["c"]),
        helper.make_node("Squeeze", ["s1"], ["s"]),
        helper.make_node("Range", ["zero", "c", "one"], ["keys"]),
        helper.make_node("Unsqueeze", ["kv_lengths", "last"], ["length"]),
        helper.make_node("Range", ["zero", "s", "one"], ["queries"]),
        helper.make_node("Unsqueeze", ["queries", "row"], ["query"]),
    ]
    if causal_kind == "lower_right":
        nodes += [
            helper.make_node("Add", ["query", "one"], ["next"]),
            helper.make_node("Sub", ["length", "s"], ["before"]),
            helper.make_node("Add", ["before", "next"], ["bound"]),
        ]
    else:
        nodes += [
            helper.make_node("Mul", ["query", "zero"], ["nothing"]),
            helper.make_node("Add", ["length", "nothing"], ["bound"]),
        ]
    nodes += [
        helper.make_node("Less", ["keys", "bound"], ["seen"]),
        helper.make_node("Attention", ["q", "k", "v", "seen"], ["y"], scale=1.0),
    ]
    inputs = ["q", "k", "v", "mask", "query_lengths", "kv_lengths"]
    opsets = [helper.make_opsetid("", 24)]
    return helper.make_function("trt", "TRT_Attention", inputs, ["y"], nodes, opsets, ["causal_kind"])


class TrtOnOrt:
    """One such graph with its caches, passed in and taken back on every run."""

    def __init__(self, path: Path, num_rows: int) -> None:
        model = onnx.load(path, load_external_data=False)
        kinds = {a.s.decode() for node in model.graph.node if node.domain == "trt" for a in node.attribute}
        if kinds:
            (kind,) = kinds
            model.functions.append(attention_function(kind))
        runnable = path.with_suffix(".ort.onnx")
        onnx.save(model, runnable)
        options = ort.SessionOptions()
        # It warns that caches are copied, which is how this helper passes them.
        options.log_severity_level = 3
        self._session = ort.InferenceSession(runnable, options, providers=["CPUExecutionProvider"])
        self.caches = {
            value.name.removeprefix("past_"): np.zeros((num_rows, *value.shape[1:]), np.float32)
            for value in self._session.get_inputs()
            if value.name.startswith("past_")
        }

    def run(self, inputs: Arrays) -> Arrays:
        """Run one pass and keep the caches it returns."""
        feeds = inputs | {f"past_{name}": cache for name, cache in self.caches.items()}
        names = [value.name for value in self._session.get_outputs()]
        outputs = dict(zip(names, self._session.run(names, feeds), strict=True))
        self.caches = {name: outputs.pop(f"present_{name}") for name in self.caches}
        return outputs
