"""Storage of one matrix: quantisation error, bytes in the file, and the products ONNX Runtime computes from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from trtllm_dspark.checkpoint.int8_rows import quantise_rows
from trtllm_dspark.graph import WEIGHT_DTYPES, WeightDtype
from trtllm_dspark.graph import _quantize as quantize
from trtllm_dspark.graph.matrices import BlockInt8Matrix, StoredMatrix, store_matrix
from trtllm_dspark.graph.network import Network, WeightFile

ROUNDING = {"float32": 1e-6, "int8": 0.02, "w8a8": 0.03}


def run(directory: Path, weight: np.ndarray, dtype: WeightDtype, x: np.ndarray) -> np.ndarray:
    """Store `weight`, multiply `x` by it through a file on disk and return the product."""
    file = WeightFile(directory / "m.data")
    net = Network("m", file)
    product = store_matrix(file, "w", weight, dtype).multiply(net, net.input("x", np.float32, ["T", x.shape[1]]))
    net.output(product, "y", np.float32, ["T", weight.shape[0]])
    file.close()
    net.save(directory / "m.onnx")
    session = ort.InferenceSession(directory / "m.onnx", providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": x})[0]
    return result


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("shape", [(8, 64), (96, 192), (33, 48), (7, 20)])
def test_product_is_within_rounding(dtype: WeightDtype, shape: tuple[int, int], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=shape).astype(np.float32)
    x = rng.normal(size=(5, shape[1])).astype(np.float32)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    error = np.sqrt(np.mean((run(tmp_path, weight, dtype, x) - expected) ** 2) / np.mean(expected**2))
    assert error < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_row_of_zeros_gives_zeros(dtype: WeightDtype, tmp_path: Path) -> None:
    weight = np.ones((8, 64), np.float32)
    weight[3] = 0
    x = np.ones((2, 64), np.float32)
    x[1] = 0
    product = run(tmp_path, weight, dtype, x)
    assert product[0, 3] == 0
    assert not product[1].any()
    assert product[0, 0] == pytest.approx(64, rel=0.01)


def test_per_token_scales_ignore_other_tokens(tmp_path: Path) -> None:
    """One token a million times larger must not change the bits of another."""
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(8, 64)).astype(np.float32), rng.normal(size=(2, 64)).astype(np.float32)
    for dtype in WEIGHT_DTYPES:
        folder = tmp_path / dtype
        folder.mkdir()
        both = run(folder, weight, dtype, x * np.array([[1], [1e6]], np.float32))
        assert np.array_equal(both[0], run(folder, weight, dtype, x)[0])


def test_quantize_blocks_error_is_half_a_step() -> None:
    weight = np.random.default_rng(0).normal(size=(10, 128)).astype(np.float32)
    codes, scales = quantize.quantize_blocks(weight, 64)
    restored = (codes.astype(np.float32) - 128) * np.repeat(scales, 64, axis=1)
    assert np.all(np.abs(restored - weight) <= 0.5001 * np.repeat(scales, 64, axis=1))
    assert codes.min() >= 1
    assert np.array_equal(np.abs(codes.astype(int) - 128).reshape(10, 2, 64).max(axis=2), np.full((10, 2), 127))


@pytest.mark.parametrize("largest", [0.0, 1e-44, 3e-39, -1e-37])
def test_quantize_of_numbers_without_a_normal_scale_gives_zeros(largest: float) -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[:, 3] = largest
    codes, _ = quantize.quantize_blocks(weight, 64)
    assert np.array_equal(codes, np.full((2, 64), 128))
    assert not quantise_rows(weight)[0].any()


def test_quantise_rows_restores_its_own_output() -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (6, 40)).astype(np.int8)
    codes[:, 0] = 127
    scales = np.array([1.0, 0.5, 3e-4, 7.0, 1e-8, 2.0], np.float32)
    again, found = quantise_rows(codes * scales[:, None])
    assert np.array_equal(again, codes)
    assert np.allclose(found, scales, rtol=1e-6)


def test_large_matrix_is_stored_in_pieces_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).normal(size=(300, 64)).astype(np.float32)
    whole = store(tmp_path / "a", weight)
    monkeypatch.setattr(quantize, "_CHUNK_ELEMENTS", 64 * 17)
    assert store(tmp_path / "b", weight) == whole
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def store(path: Path, weight: np.ndarray) -> tuple[int, ...]:
    file = WeightFile(path)
    matrix: StoredMatrix = store_matrix(file, "w", weight, "int8")
    file.close()
    assert isinstance(matrix, BlockInt8Matrix)
    return matrix.codes.offset, matrix.codes.length, matrix.scales.offset, matrix.scales.length


@pytest.mark.parametrize(("width", "block"), [(576, 64), (96, 32), (48, 16), (100, 64), (20, 32)])
def test_block_size_fits_the_width(width: int, block: int) -> None:
    assert quantize.block_size_for(width) == block


def test_embedding_rows_are_cut_to_their_width(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(9, 20)).astype(np.float32)
    file = WeightFile(tmp_path / "m.data")
    net = Network("m", file)
    net.output(
        store_matrix(file, "w", weight, "int8").gather(net, net.input("i", np.int64, ["T"])), "y", np.float32, ["T", 20]
    )
    file.close()
    net.save(tmp_path / "m.onnx")
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    rows = session.run(None, {"i": np.array([8, 0])})[0]
    assert rows.shape == (2, 20)
    assert np.abs(rows - weight[[8, 0]]).max() < 0.02
