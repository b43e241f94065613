"""Plugin nodes against the contract of the library: every planted fault is refused and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers.random_model import random_arrays
from helpers.tiny_engine import SMALL, drafter_arrays, small_drafter
from onnx import TensorProto, helper

from trtllm_dspark.errors import EngineError, EngineMismatch
from trtllm_dspark.graph import DrafterSource, RoundDrafter, RoundOptions, write_draft, write_verify
from trtllm_dspark.graph.checker import check_tensorrt
from trtllm_dspark.graph.lowering import TrtPluginLowering
from trtllm_dspark.graph.network import Network, WeightFile
from trtllm_dspark.graph.plugin_nodes import plugin

TARGET = replace(SMALL, head_dim=64)
KEPT = np.arange(0, 90, 3)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both graphs in bfloat16, with everything a graph can hold: gated head, reduced vocabulary, candidates."""
    directory = tmp_path_factory.mktemp("plugins")
    drafter, rng = small_drafter(TARGET, markov_head="gated"), np.random.default_rng(0)
    arrays, own = random_arrays(TARGET, rng), drafter_arrays(drafter, rng)
    lowering, options = TrtPluginLowering(128, 4), RoundOptions("rejection", "early_stop", 8)
    round_drafter = RoundDrafter(drafter, own, lowering, 5, "bfloat16", KEPT)
    target = write_verify(
        directory, TARGET, arrays, max_seq_len=100, lowering=lowering, options=options, drafter=round_drafter
    )
    write_draft(
        directory,
        DrafterSource(drafter, own, TARGET, arrays, target),
        max_seq_len=100,
        max_draft_len=5,
        max_num_tokens=64,
        lowering=lowering,
        options=options,
        draft_token_ids=KEPT,
    )
    return directory


def first(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def set_attribute(node: onnx.NodeProto, name: str, value: object) -> None:
    drop_attribute(node, name)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))


def drop_attribute(node: onnx.NodeProto, name: str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)


def field(op_type: str, name: str, value: object) -> Callable[[onnx.ModelProto], None]:
    return lambda model: set_attribute(first(model, op_type), name, value)


def typed(kind: int, *names: str) -> Callable[[onnx.ModelProto], None]:
    """Give graph inputs or outputs another type."""

    def plant(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            if value.name in names:
                value.type.tensor_type.elem_type = kind

    return plant


def swap(op_type: str, one: int, other: int) -> Callable[[onnx.ModelProto], None]:
    def plant(model: onnx.ModelProto) -> None:
        node = first(model, op_type)
        node.input[one], node.input[other] = node.input[other], node.input[one]

    return plant


def read_old_cache(model: onnx.ModelProto) -> None:
    first(model, "DsparkRaggedAttention").input[1] = "past_k.0"


def hide_cache(model: onnx.ModelProto) -> None:
    kept = [value for value in model.graph.output if value.name != "present_v.1"]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def inner_cache(model: onnx.ModelProto) -> None:
    node = first(model, "DsparkKvAppend")
    model.graph.node.insert(0, helper.make_node("Identity", [node.input[5]], ["copy"], name="copy"))
    node.input[5] = "copy"


def append_twice(model: onnx.ModelProto) -> None:
    node = onnx.NodeProto()
    node.CopyFrom(first(model, "DsparkKvAppend"))
    node.output[0], node.output[1] = "again_k", "again_v"
    model.graph.node.append(node)


def reshape_input(name: str, axis: int, extent: int) -> Callable[[onnx.ModelProto], None]:
    def plant(model: onnx.ModelProto) -> None:
        value = next(v for v in model.graph.input if v.name == name)
        value.type.tensor_type.shape.dim[axis].dim_value = extent

    return plant


def narrow_heads(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.name.endswith(("k.0", "v.0")):
            value.type.tensor_type.shape.dim[3].dim_value = 80


def rename(op_type: str, name: str) -> Callable[[onnx.ModelProto], None]:
    def plant(model: onnx.ModelProto) -> None:
        first(model, op_type).op_type = name

    return plant


def drop_input(model: onnx.ModelProto) -> None:
    first(model, "DsparkConfidenceSchedule").input.pop()


def drop_output(model: onnx.ModelProto) -> None:
    first(model, "DsparkMarkovDraft").output.pop()


DRAFT, ACCEPT, SCHEDULE = "DsparkMarkovDraft", "DsparkRaggedAccept", "DsparkConfidenceSchedule"
ATTENTION, APPEND = "DsparkRaggedAttention", "DsparkKvAppend"
FAULTS: dict[str, tuple[str, Callable[[onnx.ModelProto], None], str]] = {
    "version": ("target", field(ACCEPT, "plugin_version", "2"), "plugin_version 2, the plugin library has 1; write"),
    "no version": ("target", field(APPEND, "plugin_version", None), "plugin_version none, the plugin library has 1"),
    "namespace": ("target", field(ATTENTION, "plugin_namespace", ""), "plugin_namespace , the plugin library has trt"),
    "name": ("target", rename(ATTENTION, "DsparkWindowAttention"), "names the plugin DsparkWindowAttention"),
    "unknown field": ("target", field(ATTENTION, "window_size", 512), "'window_size'.*drops it silently"),
    "missing field": ("target", field(ATTENTION, "kv_split", None), "lacks the field kv_split"),
    "integer field as float": ("drafter", field(DRAFT, "head_kind", 2.0), "head_kind must be one int32"),
    "float field as integer": ("target", field(ATTENTION, "scale", 1), "scale must be one float32"),
    "list field": ("target", field(ACCEPT, "acceptance", [1]), "acceptance must be one int32"),
    "field out of range": ("drafter", field(SCHEDULE, "schedule_mode", 4), "schedule_mode is 4, expected 0 to 3"),
    "field that changes inputs": ("drafter", field(DRAFT, "head_kind", 1), "has 14 inputs, with its fields it takes"),
    "missing input": ("drafter", drop_input, "has 13 inputs, with its fields it takes"),
    "missing output": ("drafter", drop_output, "has 6 outputs, with its fields it gives"),
    "seed of 32 bits": ("drafter", typed(TensorProto.INT32, "seed"), "seed is int32, expected int64"),
    "totals of 32 bits": ("target", typed(TensorProto.INT32, "draft_totals"), "draft_totals is int32, expected int64"),
    "positions of 64 bits": ("target", typed(TensorProto.INT64, "token_position"), "token_position is int64"),
    "cache of another type": (
        "target",
        typed(TensorProto.FLOAT16, "past_k.0", "present_k.0"),
        "key_cache is float16, the tensors it must match are bfloat16",
    ),
    "swapped inputs": ("drafter", swap(DRAFT, 3, 4), "temperature is int32, expected float32"),
    "old cache": ("target", read_old_cache, "reads the cache 'past_k.0', which no DsparkKvAppend has updated"),
    "hidden cache": ("target", hide_cache, "produces 'present_v.1', which is no graph output"),
    "inner cache": ("target", inner_cache, "updates 'copy', which is no graph input"),
    "two updates": ("target", append_twice, "cache past_k.0 is updated 2 times"),
    "draft length": ("target", reshape_input("draft_entries", 1, 4), "draft_entries has gamma = 4, expected 5"),
    "candidates": ("target", reshape_input("candidates", 2, 9), "candidates has num_candidates = 9, expected 8"),
    "cache length": ("target", reshape_input("past_v.0", 2, 64), "value_cache has S = 64, expected 128"),
    "head dimension of one cache": (
        "target",
        reshape_input("past_k.0", 3, 128),
        "value_cache has D = 64, expected 128",
    ),
    "head dimension": ("target", narrow_heads, "head dimension of 80, the plugin has 64 and 128"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_checker_finds_planted_fault(name: str, written: Path) -> None:
    stem, plant, message = FAULTS[name]
    model = onnx.load(written / f"{stem}.onnx", load_external_data=False)
    check_tensorrt(model, written, plugins=True)
    plant(model)
    with pytest.raises(EngineError, match=message):
        check_tensorrt(model, written, plugins=True)


@pytest.mark.parametrize("stem", ["target", "drafter"])
def test_plugin_graphs_are_refused_where_there_are_no_plugins(stem: str, written: Path) -> None:
    model = onnx.load(written / f"{stem}.onnx", load_external_data=False)
    with pytest.raises(EngineError, match="trtllm_dspark::Dspark.*needs a plugin"):
        check_tensorrt(model, written)


def test_float32_attention_is_for_comparisons_only(tmp_path: Path) -> None:
    arrays, lowering = random_arrays(SMALL, np.random.default_rng(0)), TrtPluginLowering(128, 4, "float32")
    write_verify(
        tmp_path, SMALL, arrays, max_seq_len=64, lowering=lowering, options=RoundOptions(), weight_dtype="float32"
    )
    model = onnx.load(tmp_path / "target.onnx", load_external_data=False)
    check_tensorrt(model, plugins=True, comparison=True)
    with pytest.raises(EngineError, match="query is float32, expected float16 or bfloat16"):
        check_tensorrt(model, plugins=True)


def test_node_with_other_tensors_or_fields_is_never_written(tmp_path: Path) -> None:
    net = Network("n", WeightFile(tmp_path / "n.data"))
    inputs = dict.fromkeys(("query", "key_cache", "value_cache", "cu_tokens", "token_position"), "x")
    with pytest.raises(EngineMismatch, match="takes .*page_table"):
        plugin(net, ATTENTION, inputs, {"scale": 1.0, "causal": 1})
    with pytest.raises(EngineMismatch, match="this graph sets .*window"):
        plugin(net, ATTENTION, inputs, {"scale": 1.0, "causal": 1, "window": 5})
