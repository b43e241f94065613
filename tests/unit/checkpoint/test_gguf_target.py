from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers.gguf_files import QuantizationType, write_gguf
from helpers.tiny_models import write_target

from trtllm_dspark.checkpoint import load_target
from trtllm_dspark.errors import CheckpointError


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_load_gguf_equals_hugging_face_directory(tmp_path: Path, architecture: Any, tied: bool) -> None:
    source = load_target(write_target(tmp_path, architecture=architecture, tie_word_embeddings=tied))

    target = load_target(write_gguf(tmp_path / "m.gguf", source))

    expected = replace(source.config, bos_token_id=None, eos_token_ids=(), pad_token_id=None)
    assert target.config == expected
    assert target.arrays.keys() == source.arrays.keys()
    for name in source.arrays:
        np.testing.assert_array_equal(target.arrays[name], source.arrays[name], err_msg=name)


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_load_gguf_quantised_equals_gguf_package(tmp_path: Path, quantisation: str) -> None:
    kind = QuantizationType[quantisation]
    source = load_target(write_target(tmp_path))
    arrays = load_target(write_gguf(tmp_path / "m.gguf", source, quantisation=kind)).arrays
    for name in ("embed.weight", "layers.2.v.weight", "layers.0.down.weight"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(source.arrays[name], kind), kind)
        np.testing.assert_array_equal(arrays[name], expected)


def test_load_gguf_llama_biases_are_permuted_like_their_rows(tmp_path: Path) -> None:
    source = load_target(write_target(tmp_path, attention_bias=True))
    target = load_target(write_gguf(tmp_path / "m.gguf", source))
    assert target.config.attention_bias
    np.testing.assert_array_equal(target.arrays["layers.1.k.bias"], source.arrays["layers.1.k.bias"])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2' is not supported"),
        ({"arch__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ({"arch__rope__scaling__factor": 4.0}, r"linear rope scaling \(rope\.scaling\.factor 4\.0\) is not supported"),
        ({"arch__rope__scale_linear": 2.0}, r"linear rope scaling \(rope\.scale_linear 2\.0\) is not supported"),
        ({"arch__rope__dimension_count": 8}, "8 of 16 dimensions"),
        ({"arch__attention__value_length": 8}, "different width"),
        ({"arch__attention__sliding_window": 128}, "sliding-window"),
        ({"arch__expert_count": 4}, "mixture-of-experts"),
        ({"general__type": "adapter"}, "type 'adapter'"),
        ({"split__count": 2}, "several GGUF files"),
        ({"arch__block_count": None}, r"llama\.block_count is None"),
        ({"arch__attention__head_count_kv": [2, 2, 2, 1]}, r"head_count_kv is \[2, 2, 2, 1\]"),
        ({"arch__rope__freq_base": 0.0}, r"rope\.freq_base is 0\.0"),
        ({"arch__feed_forward_length": 64}, r"blk\.0\.ffn_gate\.weight .* has shape \[128, 64\].*\[64, 64\]"),
        ({"arch__block_count": 3}, r"holds tensor blk\.3\."),
        ({"arch__block_count": 5}, r"lacks tensor blk\.4\."),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer 'llama'"),
        ({"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "tekken"}, "pre-tokenizer 'tekken'"),
    ],
)
def test_load_gguf_unsupported_metadata_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    source = load_target(write_target(tmp_path))
    path = write_gguf(tmp_path / "m.gguf", source, **metadata)
    with pytest.raises(CheckpointError, match=message):
        load_target(path)


@pytest.mark.parametrize(
    "metadata",
    [
        {"arch__rope__scaling__factor": 1.0, "arch__rope__scale_linear": 0.0},
        {"arch__rope__scaling__type": "none", "arch__rope__scaling__factor": 4.0},
    ],
)
def test_load_gguf_rope_scaling_that_scales_nothing_is_read(tmp_path: Path, metadata: dict[str, Any]) -> None:
    source = load_target(write_target(tmp_path))
    assert load_target(write_gguf(tmp_path / "m.gguf", source, **metadata)).config.rope_scaling is None


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_output.bias"])
def test_load_gguf_unknown_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    source = load_target(write_target(tmp_path))
    path = write_gguf(tmp_path / "m.gguf", source, extra_tensors={name: np.ones(64, np.float32)})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_target(path)


@pytest.mark.parametrize("keep", [3, 12, 100, 400])
def test_load_gguf_cut_in_header_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", load_target(write_target(tmp_path)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not a GGUF file|damaged"):
        load_target(path)


def test_load_gguf_cut_in_weights_is_refused_by_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", load_target(write_target(tmp_path)))
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match="cut short: tensor"):
        load_target(path)


@pytest.mark.parametrize("version", [1, 0x03000000])
def test_load_gguf_other_version_is_refused(tmp_path: Path, version: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", load_target(write_target(tmp_path)))
    raw = bytearray(path.read_bytes())
    raw[4:8] = version.to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"GGUF version {version}"):
        load_target(path)


def test_load_gguf_unknown_block_type_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", load_target(write_target(tmp_path)))
    raw = bytearray(path.read_bytes())
    # Directory entry: name, number of dimensions (u32), dimensions (u64 each), type (u32).
    entry = raw.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    raw[entry : entry + 4] = (20).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"output_norm\.weight has ggml type 20, .* use one of BF16"):
        load_target(path)
