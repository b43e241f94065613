"""The TensorRT lowering: the same numbers as the reference, and a checker that finds every planted trap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers.random_model import random_arrays
from helpers.tiny_engine import SMALL, drafter_arrays, small_drafter
from helpers.trt_on_ort import TrtOnOrt
from onnx import helper

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.engine._packing import pack_rows
from trtllm_dspark.errors import ConfigError, EngineError
from trtllm_dspark.graph import DrafterSource, WeightDtype, write_drafter, write_target
from trtllm_dspark.graph.checker import check_tensorrt
from trtllm_dspark.graph.lowering import ORT, TrtNativeLowering
from trtllm_dspark.reference.models import drafter_block, drafter_context, target_forward

LENGTH = 96
VARIANTS = {
    "llama": SMALL,
    "qwen3": replace(SMALL, architecture="qwen3", qk_norm=True),
    "bias_tied": replace(SMALL, attention_bias=True, tie_word_embeddings=True),
}


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(got - expected).max() < 1e-4 * np.abs(expected).max())


def packed(rows: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
    indices = pack_rows(rows, starts)
    return {"positions": indices.positions, "pad_index": indices.pad_index, "write_indices": starts}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_target_in_float32_equals_reference_over_ragged_rounds(config: ModelConfig, tmp_path: Path) -> None:
    arrays = random_arrays(config, np.random.default_rng(0))
    lowering = TrtNativeLowering(LENGTH, "float32")
    write_target(
        tmp_path,
        config,
        arrays,
        max_seq_len=80,
        feature_layer_ids=(0, 2),
        weight_dtype="float32",
        lowering=lowering,
    )
    graph = TrtOnOrt(tmp_path / "target.onnx", 2)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 60))
    expected = [target_forward(config, arrays, row, feature_layer_ids=(0, 2)) for row in tokens]
    starts, rows = np.zeros(2, np.int64), np.array([9, 4])
    rng = np.random.default_rng(2)
    while (starts + rows).max() <= 60:
        spans = [slice(s, s + n) for s, n in zip(starts, rows, strict=True)]
        ids = np.concatenate([row[span] for row, span in zip(tokens, spans, strict=True)])
        index = pack_rows(rows, starts)
        inputs = packed(rows, starts.copy()) | {"input_ids": ids, "pack_index": index.pack_index}
        out = graph.run(inputs | {"logit_rows": np.arange(len(ids))})
        assert close(out["logits"], np.concatenate([e.logits[s] for e, s in zip(expected, spans, strict=True)]))
        assert close(out["features"], np.concatenate([e.features[s] for e, s in zip(expected, spans, strict=True)]))
        starts += rows
        rows = rng.integers(1, 9, 2)


def test_drafter_in_float32_equals_reference(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    config, arrays = small_drafter(), random_arrays(SMALL, rng)
    own = drafter_arrays(config, rng)
    lowering = TrtNativeLowering(LENGTH, "float32")
    target = write_target(tmp_path, SMALL, arrays, max_seq_len=80, weight_dtype="float32", lowering=lowering)
    source = DrafterSource(config, own, SMALL, arrays, target)
    write_drafter(tmp_path, source, max_seq_len=80, max_draft_len=5, weight_dtype="float32", lowering=lowering)
    context, block = (TrtOnOrt(tmp_path / f"drafter_{name}.onnx", 2) for name in ("context", "block"))
    features = rng.normal(size=(2, 40, config.feature_size)).astype(np.float32)
    lengths = np.array([40, 17])
    rows = np.concatenate([features[0, :40], features[1, :17]])
    context.run(packed(lengths, np.zeros(2, np.int64)) | {"features": rows})
    block.caches = context.caches
    ids = np.full((2, 5), config.mask_token_id)
    ids[:, 0] = (6, 7)
    out = block.run({"input_ids": ids, "write_indices": lengths})
    for row, (length, anchor) in enumerate(zip(lengths, (6, 7), strict=True)):
        expected = drafter_block(
            config, own, drafter_context(config, own, features[row, :length]), anchor, target_arrays=arrays
        )
        assert close(out["base_logits"][row], expected.base_logits)
        assert close(out["hidden"][row], expected.hidden)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_graphs_store_half_weights_but_project_features_in_float32(dtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    config, arrays = small_drafter(), random_arrays(SMALL, rng)
    lowering = TrtNativeLowering(LENGTH, dtype)  # type: ignore[arg-type]
    weight_dtype: WeightDtype = dtype  # type: ignore[assignment]
    target = write_target(tmp_path, SMALL, arrays, max_seq_len=80, weight_dtype=weight_dtype, lowering=lowering)
    source = DrafterSource(config, drafter_arrays(config, rng), SMALL, arrays, target)
    write_drafter(tmp_path, source, max_seq_len=80, max_draft_len=5, weight_dtype=weight_dtype, lowering=lowering)
    half = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}[dtype]
    for name in ("target", "drafter_context", "drafter_block"):
        model = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False)
        floats = {t.name: t.data_type for t in model.graph.initializer if t.data_type != onnx.TensorProto.INT64}
        single = {name for name, kind in floats.items() if kind != half}
        assert single == ({"fc.weight", "hidden_norm.weight"} if name == "drafter_context" else set())
        assert {v.type.tensor_type.elem_type for v in model.graph.input if v.name.startswith("past_")} == {half}


def test_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL, np.random.default_rng(0))
    arrays["layers.1.down.weight"][0, 0] = 1e5
    with pytest.raises(ConfigError, match=r"layers\.1\.down\.weight.*bfloat16"):
        write_target(
            tmp_path,
            SMALL,
            arrays,
            max_seq_len=80,
            weight_dtype="float16",
            lowering=TrtNativeLowering(LENGTH, "float16"),
        )


@pytest.mark.parametrize(("lowering", "dtype"), [(ORT, "float16"), (TrtNativeLowering(LENGTH), "int8")])
def test_weight_format_of_another_lowering_is_refused(
    lowering: TrtNativeLowering, dtype: WeightDtype, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{dtype} cannot be used by the {lowering.name} lowering"):
        write_target(tmp_path, SMALL, {}, max_seq_len=80, weight_dtype=dtype, lowering=lowering)


@pytest.fixture
def safe(tmp_path: Path) -> onnx.ModelProto:
    arrays = random_arrays(SMALL, np.random.default_rng(0))
    lowering = TrtNativeLowering(LENGTH)
    write_target(tmp_path, SMALL, arrays, max_seq_len=80, weight_dtype="bfloat16", lowering=lowering)
    model = onnx.load(tmp_path / "target.onnx", load_external_data=False)
    check_tensorrt(model)
    return model


def first(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def make_attention(model: onnx.ModelProto, **changes: object) -> None:
    node = first(model, "TRT_Attention")
    lengths = node.input[5]
    node.op_type, node.domain = "Attention", ""
    del node.attribute[:]
    node.input[5] = ""
    if changes.pop("nonpad", False):
        node.input.append(lengths)
    if changes.pop("past", False):
        node.input[4] = "past_k.0"
    node.attribute.extend(helper.make_attribute(name, value) for name, value in changes.items())


def set_attribute(model: onnx.ModelProto, op_type: str, name: str, value: object) -> None:
    node = first(model, op_type)
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def drop_output(model: onnx.ModelProto, name: str) -> None:
    kept = [value for value in model.graph.output if value.name != name]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def make_dynamic(model: onnx.ModelProto) -> None:
    cache = next(value for value in model.graph.input if value.name == "past_v.1")
    cache.type.tensor_type.shape.dim[2].dim_param = "C"


def update_twice(model: onnx.ModelProto) -> None:
    node = onnx.NodeProto()
    node.CopyFrom(first(model, "TensorScatter"))
    model.graph.node.append(node)


def make_single_table(model: onnx.ModelProto) -> None:
    next(t for t in model.graph.initializer if t.name == "rope.cos").data_type = onnx.TensorProto.FLOAT


def move_scale_behind_rotation(model: onnx.ModelProto) -> None:
    """What an exporter would write: a Mul between the rotation and attention, its result published."""
    rotary = next(
        node for node in model.graph.node if node.op_type == "RotaryEmbedding" and node.output[0] == "query.0"
    )
    rotary.output[0] = "rotated"
    index = list(model.graph.node).index(rotary) + 1
    model.graph.node.insert(index, helper.make_node("Mul", ["rotated", "rotated"], ["query.0"], name="scale"))


def scale_cache(model: onnx.ModelProto) -> None:
    """The parser's own spelling of an attention scale: the whole K cache times a number."""
    node = first(model, "TRT_Attention")
    model.graph.node.append(helper.make_node("Mul", [node.input[1], node.input[1]], ["scaled"], name="scale"))
    node.input[1] = "scaled"


def read_old_cache(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Identity", ["past_k.0"], ["kept"], name="copy"))


def add_unread_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("nonpad_kv_seqlen", onnx.TensorProto.INT64, ["R"]))


def make_single_caches(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past_", "present_")):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT


def flatten_cache(model: onnx.ModelProto) -> None:
    cache = next(value for value in model.graph.input if value.name == "past_v.1")
    del cache.type.tensor_type.shape.dim[1]


def add_cumulative_product(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("CumProd", ["logits", "axis"], ["survival"], name="survival"))


def mask_and_cause(model: onnx.ModelProto) -> None:
    make_attention(model, is_causal=1)
    first(model, "Attention").input[3] = "positions"


def give_mask(model: onnx.ModelProto) -> None:
    first(model, "TRT_Attention").input[3] = "positions"


def add_plugin_node(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("MatMulNBits", ["x"], ["y"], name="plugin", domain="com.microsoft"))


TRAPS: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "nonpad_kv_seqlen": (lambda m: make_attention(m, nonpad=True), "nonpad_kv_seqlen.*silently"),
    "window": (lambda m: make_attention(m, left_window_size=8), "left_window_size.*silently"),
    "attention with its own cache": (lambda m: make_attention(m, past=True), "TensorScatter"),
    "plain attention": (make_attention, "copies the whole cache"),
    "queries not an output": (lambda m: drop_output(m, "query.1"), "query.1.*copy the caches"),
    "scale attribute": (lambda m: set_attribute(m, "TRT_Attention", "scale", 0.5), "fold the scale"),
    "causal kind": (lambda m: set_attribute(m, "TRT_Attention", "causal_kind", "upper_left"), "upper_left"),
    "no lengths": (lambda m: first(m, "TRT_Attention").input.pop() and None, "no kv_lengths"),
    "circular scatter": (lambda m: set_attribute(m, "TensorScatter", "mode", "circular"), "circular"),
    "scatter axis": (lambda m: set_attribute(m, "TensorScatter", "axis", 1), "axis 1"),
    "hidden successor": (lambda m: drop_output(m, "present_k.2"), "present_k.2.*no graph output"),
    "dynamic cache length": (make_dynamic, "past_v.1 needs four dimensions and a static length"),
    "two updates": (update_twice, "past_k.0 is updated 2 times"),
    "float32 rotary table": (make_single_table, "tables of another type"),
    "softcap": (lambda m: make_attention(m, softcap=30.0), "softcap, which the parser refuses"),
    "softmax precision": (lambda m: make_attention(m, softmax_precision=1), "softmax_precision, which the parser"),
    "mask and causality": (mask_and_cause, "a mask and is_causal"),
    "mask beside lengths": (give_mask, "a mask beside its lengths"),
    "scale behind the rotation": (move_scale_behind_rotation, "queries of a Mul, not of the RotaryEmbedding"),
    "scaled cache": (scale_cache, "reads the whole updated cache 'present_k.0' each pass"),
    "second reader of a cache": (read_old_cache, "reads the cache 'past_k.0' beside its update"),
    "unread input": (add_unread_input, "no node reads the graph input 'nonpad_kv_seqlen'"),
    "float32 caches": (make_single_caches, "caches are float32.*no fused attention"),
    "cache of three dimensions": (flatten_cache, "past_v.1 needs four dimensions"),
    "cumulative product": (add_cumulative_product, "CumProd, which has no importer"),
    "another plugin's operator": (add_plugin_node, "com.microsoft::MatMulNBits, which needs a plugin"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_checker_finds_planted_trap(name: str, safe: onnx.ModelProto) -> None:
    plant, message = TRAPS[name]
    plant(safe)
    with pytest.raises(EngineError, match=message):
        check_tensorrt(safe)


@pytest.mark.parametrize("turned", [False, True], ids=["copied", "transposed"])
def test_checker_finds_a_head_stored_twice(turned: bool, tmp_path: Path) -> None:
    """A tied head spelled as a weight of its own: the plan would hold the table twice."""
    config = replace(SMALL, vocab_size=1024, tie_word_embeddings=True)
    arrays = random_arrays(config, np.random.default_rng(0))
    lowering = TrtNativeLowering(LENGTH)
    write_target(tmp_path, config, arrays, max_seq_len=80, weight_dtype="bfloat16", lowering=lowering)
    model = onnx.load(tmp_path / "target.onnx", load_external_data=False)
    check_tensorrt(model, tmp_path)
    stored = next(tensor for tensor in model.graph.initializer if tensor.name == "embed.weight")
    table = onnx.numpy_helper.to_array(stored, str(tmp_path))
    second = onnx.numpy_helper.from_array(np.ascontiguousarray(table.T) if turned else table, "lm_head.weight")
    model.graph.initializer.append(second)
    onnx.save(model, tmp_path / "planted.onnx", save_as_external_data=False)
    planted = onnx.load(tmp_path / "planted.onnx", load_external_data=False)
    for tensor in planted.graph.initializer:
        if tensor.name == "lm_head.weight":
            onnx.external_data_helper.set_external_data(tensor, "second.data", 0, len(tensor.raw_data))
            (tmp_path / "second.data").write_bytes(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
    with pytest.raises(EngineError, match=r"'embed.weight' and 'lm_head.weight' hold the same values"):
        check_tensorrt(planted, tmp_path)


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "w8a16"])
def test_checker_accepts_copied_layers_and_projections_of_zeros(weight_dtype: WeightDtype, tmp_path: Path) -> None:
    """What a checkpoint made deeper by copies of its layers holds, and one whose new layers begin as zeros."""
    config = replace(SMALL, num_layers=4, hidden_size=256, intermediate_size=512, head_dim=64)
    arrays = random_arrays(config, np.random.default_rng(0))
    for name in [name for name in arrays if name.startswith("layers.0.")]:
        arrays[f"layers.1.{name.removeprefix('layers.0.')}"] = arrays[name]
    for layer in (2, 3):
        for name in ("o", "down"):
            arrays[f"layers.{layer}.{name}.weight"] = np.zeros_like(arrays[f"layers.{layer}.{name}.weight"])
    # As large as what the check compares.
    assert arrays["layers.1.o.weight"].size >= 1 << 16
    lowering = TrtNativeLowering(LENGTH)
    write_target(tmp_path, config, arrays, max_seq_len=80, weight_dtype=weight_dtype, lowering=lowering)
    check_tensorrt(onnx.load(tmp_path / "target.onnx", load_external_data=False), tmp_path)


def test_checker_finds_a_table_equal_to_a_matrix_of_a_layer(tmp_path: Path) -> None:
    config = replace(SMALL, vocab_size=512, hidden_size=256, intermediate_size=512, head_dim=64)
    arrays = random_arrays(config, np.random.default_rng(0))
    arrays["lm_head.weight"] = np.ascontiguousarray(arrays["layers.2.down.weight"].T)
    with pytest.raises(EngineError, match=r"'layers.2.down.weight' and 'lm_head.weight' hold the same values"):
        write_target(
            tmp_path, config, arrays, max_seq_len=80, weight_dtype="bfloat16", lowering=TrtNativeLowering(LENGTH)
        )


def test_checker_refuses_the_graph_of_the_cpu_engine(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL, np.random.default_rng(0))
    write_target(tmp_path, SMALL, arrays, max_seq_len=80, weight_dtype="float32")
    with pytest.raises(EngineError, match="needs a plugin"):
        check_tensorrt(onnx.load(tmp_path / "target.onnx", load_external_data=False))
