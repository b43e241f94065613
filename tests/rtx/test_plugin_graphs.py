"""What a builder without plugins can compile of the plugin graphs: everything between the plugin nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
from helpers.random_model import random_arrays
from helpers.tiny_engine import SMALL, drafter_arrays, small_drafter
from onnx import TensorProto, helper

from trtllm_dspark.build.tensorrt.compiler import run_builder
from trtllm_dspark.build.tensorrt.layers import weight_bytes
from trtllm_dspark.build.tensorrt.profiles import Profile
from trtllm_dspark.build.tensorrt_rtx import TENSORRT_RTX
from trtllm_dspark.graph import DrafterSource, RoundDrafter, RoundOptions, write_draft, write_verify
from trtllm_dspark.graph.lowering import TrtPluginLowering
from trtllm_dspark.graph.plugin_nodes import PLUGIN_DOMAIN, plugin_specs
from trtllm_dspark.plugins.contract import PluginTensor

pytestmark = pytest.mark.tensorrt_rtx

TARGET = replace(SMALL, head_dim=64, vocab_size=1024)
KEPT = np.arange(0, 1024, 2)
SIZES = {"Hq": 4, "Hkv": 2, "D": 64, "gamma": 5, "Vd": 512}
HALF = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
TYPES = {"int32": TensorProto.INT32, "int64": TensorProto.INT64, "float32": TensorProto.FLOAT}


# T is R times the block, as among the rows of the draft graph.
PROFILE = Profile("decode", 4, 5, 20, 20)


@pytest.mark.parametrize(("dtype", "architecture"), [("float16", "sm89"), ("bfloat16", "sm120")])
def test_rest_of_the_plugin_graphs_compiles(
    dtype: Literal["float16", "bfloat16"], architecture: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    drafter, arrays = small_drafter(TARGET, markov_head="gated"), random_arrays(TARGET, rng)
    own, lowering, options = drafter_arrays(drafter, rng), TrtPluginLowering(128, 4, dtype), RoundOptions()
    round_drafter = RoundDrafter(drafter, own, lowering, 5, dtype, KEPT)
    written = write_verify(
        tmp_path,
        TARGET,
        arrays,
        max_seq_len=100,
        lowering=lowering,
        options=options,
        drafter=round_drafter,
        weight_dtype=dtype,
    )
    write_draft(
        tmp_path,
        DrafterSource(drafter, own, TARGET, arrays, written),
        max_seq_len=100,
        max_draft_len=5,
        max_num_tokens=64,
        lowering=lowering,
        options=options,
        draft_token_ids=KEPT,
        weight_dtype=dtype,
    )
    for stem in ("target", "drafter"):
        model = without_plugins(onnx.load(tmp_path / f"{stem}.onnx", load_external_data=False), HALF[dtype])
        path = tmp_path / f"{stem}.rest.onnx"
        path.write_bytes(model.SerializeToString())
        built = run_builder(TENSORRT_RTX, path, model, [PROFILE], architecture)
        lengths = [e.value for t in model.graph.initializer for e in t.external_data if e.key == "length"]
        assert 0.9 * sum(map(int, lengths)) < weight_bytes(built.messages) < 1.02 * sum(map(int, lengths)) + (1 << 20)


def without_plugins(model: onnx.ModelProto, half: int) -> onnx.ModelProto:
    """Cut plugin nodes out: what they give becomes inputs, what they take becomes outputs."""
    graph = model.graph
    rest = [node for node in graph.node if node.domain != PLUGIN_DOMAIN]
    read, made = ({name for node in rest for name in values(node)} for values in (_inputs, _outputs))
    inputs = {value.name: value for value in graph.input if value.name in read}
    outputs = {value.name: value for value in graph.output if value.name in made}

    def declared(name: str, tensor: PluginTensor) -> onnx.ValueInfoProto:
        kind = TYPES[tensor.dtypes[0]] if len(tensor.dtypes) == 1 else half
        dims = [int(symbol) if symbol.isdigit() else SIZES.get(symbol, symbol) for symbol in tensor.dims]
        return helper.make_tensor_value_info(name, kind, dims)

    for node in graph.node:
        if node.domain == PLUGIN_DOMAIN:
            fields = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.name.startswith("plugin_")}
            spec = plugin_specs()[node.op_type]
            for tensor, name in zip(spec.outputs(fields), node.output, strict=True):
                if name in read:
                    inputs.setdefault(name, declared(name, tensor))
            for tensor, name in zip(spec.inputs(fields), node.input, strict=True):
                if name in made:
                    outputs.setdefault(name, declared(name, tensor))
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    opsets = [entry for entry in model.opset_import if entry.domain == ""]
    cut = helper.make_graph(rest, graph.name, list(inputs.values()), list(outputs.values()), kept)
    return helper.make_model(cut, opset_imports=opsets, ir_version=model.ir_version)


def _inputs(node: onnx.NodeProto) -> list[str]:
    return list(node.input)


def _outputs(node: onnx.NodeProto) -> list[str]:
    return list(node.output)
