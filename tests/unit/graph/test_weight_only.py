"""Weight-only matrices: what is stored dequantises to the weight, in a graph that ONNX Runtime executes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from helpers.random_model import random_arrays
from helpers.tiny_engine import SMALL, drafter_arrays, small_drafter
from helpers.trt_on_ort import TrtOnOrt

from trtllm_dspark.engine._packing import pack_rows
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph import DrafterSource, WeightDtype, write_drafter, write_target
from trtllm_dspark.graph.lowering import TrtNativeLowering
from trtllm_dspark.graph.network import Network, WeightFile
from trtllm_dspark.graph.weight_only import WEIGHT_ONLY, store_weight_only
from trtllm_dspark.reference.models import target_forward

# Largest error of a code, in scales: half a step of an integer; e4m3 steps by 32 between 256 and 448.
HALF_STEP = {"w8a16": 0.5, "w4a16": 0.5, "fp8": 16}
LARGEST = {"w8a16": 127, "w4a16": 7, "fp8": 448}
BYTES = {"w8a16": 1.0, "w4a16": 0.5, "fp8": 1.0}


def run(tmp_path: Path, weight: np.ndarray, dtype: WeightDtype, x: np.ndarray) -> np.ndarray:
    file = WeightFile(tmp_path / "g.data")
    net = Network("g", file)
    matrix = store_weight_only(file, "w", weight, dtype, net.dtype)
    net.output(matrix.multiply(net, net.input("x", np.float32, ["T", weight.shape[1]])), "y", np.float32, ["T", None])
    net.save(tmp_path / "g.onnx")
    file.close()
    session = ort.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return y  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", WEIGHT_ONLY)
@pytest.mark.parametrize("shape", [(8, 128), (24, 64), (3, 96), (1, 256)])
def test_stored_weight_is_within_half_a_step(dtype: WeightDtype, shape: tuple[int, int], tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight[0] *= 100
    stored = run(tmp_path, weight, dtype, np.eye(shape[1], dtype=np.float32)).T
    group = next(size for size in (128, 64, 32) if shape[1] % size == 0) if dtype == "w4a16" else shape[1]
    groups = np.abs(weight).reshape(shape[0], -1, group)
    step = np.repeat(groups.max(axis=2) / LARGEST[dtype], group, axis=1)
    assert (np.abs(stored - weight) <= step * HALF_STEP[dtype] * 1.001).all()
    assert np.abs(stored - weight).max() > 0


@pytest.mark.parametrize("dtype", WEIGHT_ONLY)
def test_codes_take_the_bytes_they_say(dtype: WeightDtype, tmp_path: Path) -> None:
    file = WeightFile(tmp_path / "g.data")
    matrix = store_weight_only(file, "w", np.ones((64, 256), np.float32), dtype, np.dtype(ml_dtypes.bfloat16))
    file.close()
    assert matrix.codes.length == 64 * 256 * BYTES[dtype]
    assert matrix.scales.shape == ((64, 2) if dtype == "w4a16" else (64,))
    assert matrix.scales.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", WEIGHT_ONLY)
def test_rows_of_zeros_and_below_the_smallest_scale_are_zeros(dtype: WeightDtype, tmp_path: Path) -> None:
    weight = np.ones((4, 64), np.float32)
    weight[1], weight[2] = 0, 1e-45
    stored = run(tmp_path, weight, dtype, np.eye(64, dtype=np.float32)).T
    assert not stored[1:3].any()
    np.testing.assert_allclose(stored[0], 1, rtol=1e-3)


def test_int4_without_a_block_that_divides_the_rows_is_refused(tmp_path: Path) -> None:
    file = WeightFile(tmp_path / "g.data")
    with pytest.raises(ConfigError, match=r"rows of 48 weights of 'w' are no multiple of 32.*use int8"):
        store_weight_only(file, "w", np.ones((2, 48), np.float32), "w4a16", np.dtype(np.float32))
    file.close()


@pytest.mark.parametrize("dtype", WEIGHT_ONLY)
def test_target_keeps_tables_in_float_and_computes_with_the_stored_weights(dtype: WeightDtype, tmp_path: Path) -> None:
    config = replace(SMALL, attention_bias=True)
    arrays = random_arrays(config, np.random.default_rng(0))
    write_target(
        tmp_path, config, arrays, max_seq_len=80, weight_dtype=dtype, lowering=TrtNativeLowering(96, "float32")
    )
    model = onnx.load(tmp_path / "target.onnx", load_external_data=False)
    kinds = {t.name: t.data_type for t in model.graph.initializer}
    assert kinds["embed.weight"] == kinds["lm_head.weight"] == onnx.TensorProto.FLOAT
    codes = [name for name in kinds if name.endswith("/codes")]
    # q, k, v, o, gate and up, down of every layer.
    assert len(codes) == 6 * config.num_layers
    tokens, starts = np.arange(20) % config.vocab_size, np.zeros(1, np.int64)
    index = pack_rows(np.array([20]), starts)
    inputs = {"positions": index.positions, "pad_index": index.pad_index, "pack_index": index.pack_index}
    inputs |= {"input_ids": tokens, "write_indices": starts, "logit_rows": np.arange(20)}
    got = TrtOnOrt(tmp_path / "target.onnx", 1).run(inputs)["logits"]
    for name in [name for name in arrays if name.startswith("layers.") and arrays[name].ndim == 2]:
        arrays[name] = run(tmp_path, arrays[name], dtype, np.eye(arrays[name].shape[1], dtype=np.float32)).T
    expected = target_forward(config, arrays, tokens).logits
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_drafter_in_another_type_than_its_target_shares_the_tables(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    config, arrays = small_drafter(), random_arrays(SMALL, rng)
    target = write_target(
        tmp_path, SMALL, arrays, max_seq_len=80, weight_dtype="bfloat16", lowering=TrtNativeLowering(96, "bfloat16")
    )
    source = DrafterSource(config, drafter_arrays(config, rng), SMALL, arrays, target)
    lowering = TrtNativeLowering(96, "float16")
    write_drafter(tmp_path, source, max_seq_len=80, max_draft_len=5, weight_dtype="w8a16", lowering=lowering)
    model = onnx.load(tmp_path / "drafter_block.onnx", load_external_data=False)
    onnx.checker.check_model(tmp_path / "drafter_context.onnx")
    kinds = {t.name: t.data_type for t in model.graph.initializer}
    assert kinds["embed.weight"] == kinds["lm_head.weight"] == onnx.TensorProto.BFLOAT16
    assert kinds["layers.0.q.weight/scales"] == onnx.TensorProto.FLOAT16
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=False)
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    (lookup,) = [n for n in model.graph.node if n.op_type == "Gather" and n.input[0] == "embed.weight"]
    (product,) = [n for n in model.graph.node if n.op_type == "Gemm" and n.input[1] == "lm_head.weight"]
    assert types[lookup.output[0]] == types[product.input[0]] == onnx.TensorProto.BFLOAT16
