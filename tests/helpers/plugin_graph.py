"""Run a graph of the plugin lowering on ONNX Runtime, its heads by a callable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from helpers.plugin_functions import DOMAIN, kv_append, ragged_attention
from trtllm_dspark.plugins import expected_contract, parse_contract

Arrays = dict[str, np.ndarray]
Heads = Callable[[str, dict[str, Any], Arrays], Arrays]
HEADS = ("DsparkMarkovDraft", "DsparkConfidenceSchedule", "DsparkRaggedAccept")


class PluginGraph:
    """One graph in float32.

    Attributes:
        seen: inputs of the heads' nodes in the last run, by node operator.
    """

    def __init__(self, path: Path, heads: Heads, caches: Arrays) -> None:
        """Load a graph; `caches` holds name without `past_` -> the whole cache, its missing ones become zeros."""
        model = onnx.load(path, load_external_data=False)
        self.heads, self._specs = heads, parse_contract(expected_contract())
        self._tail = _reached_from_heads(model.graph)
        late = {name for node in self._tail for name in node.output}
        self.outputs = list(model.graph.output)
        self._outputs = [value.name for value in self.outputs]
        inputs = {value.name for value in model.graph.input}
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        wanted = {name for node in self._tail for name in node.input} - late
        self._weights = {n: numpy_helper.to_array(stored[n], str(path.parent)) for n in wanted & set(stored)}
        self._names = sorted((wanted - set(stored) - inputs) | (set(self._outputs) - late))
        self._inputs = {value.name: value for value in model.graph.input}
        self._session = _session(path, model, self._tail, self._names)
        self._read = {value.name for value in self._session.get_inputs()}
        self.caches = caches
        self._own = [name.removeprefix("past_") for name in self._inputs if name.startswith("past_")]
        for name in self._own:
            dims = [dim.dim_value for dim in self._inputs[f"past_{name}"].type.tensor_type.shape.dim]
            assert caches.setdefault(name, np.zeros(dims, np.float32)).shape == tuple(dims)
        self.seen: dict[str, Arrays] = {}
        self._singles: dict[str, ReferenceEvaluator] = {}

    @property
    def inputs(self) -> list[onnx.ValueInfoProto]:
        """The declared inputs."""
        return list(self._inputs.values())

    def run(self, inputs: Arrays) -> Arrays:
        """Run one pass and keep the caches it returns; every declared input must be there, in its declared type."""
        values = inputs | {f"past_{name}": self.caches[name] for name in self._own}
        assert set(values) == set(self._inputs)
        for name, value in values.items():
            kind = self._inputs[name].type.tensor_type
            assert value.dtype == helper.tensor_dtype_to_np_dtype(kind.elem_type), name
            assert all(d.dim_value in (0, n) for d, n in zip(kind.shape.dim, value.shape, strict=True)), name
        found = self._session.run(self._names, {name: values[name] for name in self._read})
        values |= self._weights | dict(zip(self._names, found, strict=True))
        for node in self._tail:
            results = self._run_head(node, values) if node.op_type in HEADS else self._run_single(node, values)
            values |= dict(zip(node.output, results, strict=True))
        self.caches |= {name: values[f"present_{name}"] for name in self._own}
        return {name: values[name] for name in self._outputs if not name.startswith("present_")}

    def _run_head(self, node: onnx.NodeProto, values: Arrays) -> list[np.ndarray]:
        spec = self._specs[node.op_type]
        fields = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.name.startswith("plugin_")}
        tensors = spec.inputs(fields)
        inputs = {t.name: values[name] for t, name in zip(tensors, node.input, strict=True)}
        self.seen[node.op_type] = inputs
        results = self.heads(node.op_type, fields, inputs)
        return [results[tensor.name] for tensor in spec.outputs(fields)]

    def _run_single(self, node: onnx.NodeProto, values: Arrays) -> list[np.ndarray]:
        """Run one standard node."""
        names = [name for name in node.input if name]
        if node.output[0] not in self._singles:
            kinds = {name: helper.np_dtype_to_tensor_dtype(values[name].dtype) for name in names}
            graph = helper.make_graph(
                [node],
                "single",
                [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()],
                [helper.make_tensor_value_info(name, onnx.TensorProto.UNDEFINED, None) for name in node.output],
            )
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
            self._singles[node.output[0]] = ReferenceEvaluator(model)
        feeds = {name: values[name] for name in names}
        results: list[np.ndarray] = self._singles[node.output[0]].run(None, feeds)
        return results


def _reached_from_heads(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Nodes that are heads or need one's result, in order."""
    late: set[str] = set()
    tail = []
    for node in graph.node:
        if node.op_type in HEADS or late & set(node.input):
            tail.append(node)
            late |= set(node.output)
    return tail


def _session(path: Path, model: onnx.ModelProto, tail: list[onnx.NodeProto], names: list[str]) -> ort.InferenceSession:
    late = {name for node in tail for name in node.output}
    kept = [node for node in model.graph.node if not late & set(node.output)]
    causal = {a.i for n in kept for a in n.attribute if n.op_type == "DsparkRaggedAttention" and a.name == "causal"}
    head = onnx.ModelProto()
    head.CopyFrom(model)
    del head.graph.node[:], head.graph.output[:], head.graph.input[:]
    head.graph.node.extend(kept)
    read = {name for node in kept for name in node.input}
    head.graph.input.extend(value for value in model.graph.input if value.name in read)
    known = {value.name: value for value in model.graph.output}
    # Types of inner values follow from the graph.
    head.graph.output.extend(known.get(name, onnx.ValueInfoProto(name=name)) for name in names)
    head.functions.append(kv_append())
    head.functions.extend(ragged_attention(causal=bool(flag)) for flag in causal)
    if DOMAIN not in {entry.domain for entry in head.opset_import}:
        head.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    runnable = path.with_suffix(".plugins.onnx")
    onnx.save(head, runnable)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(runnable, options, providers=["CPUExecutionProvider"])
