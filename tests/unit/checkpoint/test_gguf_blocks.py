import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from trtllm_dspark.checkpoint._gguf_blocks import BLOCK_FORMATS, dequantise


@pytest.mark.parametrize("kind", sorted(BLOCK_FORMATS), ids=lambda kind: BLOCK_FORMATS[kind].name)
def test_dequantise_random_blocks_equals_gguf_package(kind: int) -> None:
    block_format = BLOCK_FORMATS[kind]
    rng = np.random.default_rng(kind)
    num_blocks = 4 * 256
    raw = rng.integers(0, 256, (num_blocks, block_format.block_bytes), dtype=np.uint8)
    if block_format.block_size == 1:
        stored = rng.standard_normal(num_blocks).astype(np.float32)
        raw = gguf.quants.quantize(stored, gguf.GGMLQuantizationType(kind)).view(np.uint8).reshape(num_blocks, -1)
    else:
        # Scales are float16 fields: keep their exponents small, so that no block is NaN or infinite.
        raw[:, :] = np.where(raw & 0x7C == 0x7C, raw & 0x83, raw)
    shape = (4, num_blocks * block_format.block_size // 4)

    values = dequantise(block_format, raw.reshape(-1), shape)

    expected = dequantize(raw.reshape(4, -1), gguf.GGMLQuantizationType(kind)).astype(np.float32).reshape(shape)
    assert values.dtype == np.float32
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(values, expected)


def test_dequantise_more_than_one_piece_equals_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(0).integers(0, 120, 20 * 1000, dtype=np.uint8)
    whole = dequantise(BLOCK_FORMATS[3], raw, (1000, 32))
    monkeypatch.setattr("trtllm_dspark.checkpoint._gguf_blocks._CHUNK_BYTES", 20 * 7)
    np.testing.assert_array_equal(dequantise(BLOCK_FORMATS[3], raw, (1000, 32)), whole)
