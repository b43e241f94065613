"""Shape of the emitted graphs: what is stored, shared, named and refused."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers.random_model import random_arrays
from helpers.tiny_engine import SMALL, drafter_arrays, make_engine, small_drafter

from trtllm_dspark.checkpoint.config import RopeScaling
from trtllm_dspark.errors import ConfigError, EngineError, ShapeError
from trtllm_dspark.graph import DrafterSource, read_heads, write_drafter, write_heads, write_target
from trtllm_dspark.graph._rope import inverse_frequencies, rope_tables
from trtllm_dspark.graph.network import Network, WeightFile


def read(directory: Path, name: str) -> onnx.ModelProto:
    return onnx.load(directory / name, load_external_data=False)


def locations(model: onnx.ModelProto) -> dict[str, tuple[str, str]]:
    found = {}
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            found[tensor.name] = (entries["location"], entries["offset"])
    return found


def test_graphs_declare_the_documented_inputs_and_outputs(tmp_path: Path) -> None:
    make_engine(tmp_path, SMALL, small_drafter())
    caches = {f"{kind}.{layer}" for kind in "kv" for layer in range(SMALL.num_layers)}
    small = {f"{kind}.{layer}" for kind in "kv" for layer in range(2)}
    expected = {
        "target.onnx": (
            {"input_ids", "positions", "pad_index", "pack_index", "write_indices", "logit_rows"},
            {"logits", "features"},
            caches,
        ),
        "drafter_context.onnx": ({"features", "positions", "pad_index", "write_indices"}, set(), small),
        "drafter_block.onnx": ({"input_ids", "write_indices"}, {"base_logits", "hidden"}, small),
    }
    for name, (inputs, outputs, cached) in expected.items():
        graph = read(tmp_path, name).graph
        assert {value.name for value in graph.input} == inputs | {f"past_{c}" for c in cached}
        assert {value.name for value in graph.output} == outputs | {f"present_{c}" for c in cached}


def test_graphs_are_topologically_ordered_and_use_opset_24(tmp_path: Path) -> None:
    make_engine(tmp_path, SMALL, small_drafter(), weight_dtype="w8a8")
    for name in ("target.onnx", "drafter_context.onnx", "drafter_block.onnx"):
        model = read(tmp_path, name)
        assert {entry.domain: entry.version for entry in model.opset_import}[""] == 24
        known = {v.name for v in model.graph.input} | {t.name for t in model.graph.initializer} | {""}
        for node in model.graph.node:
            assert set(node.input) <= known, node.name
            known |= set(node.output)
        assert len(known) == len(model.graph.input) + len(model.graph.initializer) + 1 + sum(
            len(node.output) for node in model.graph.node
        )


def test_tied_head_and_embedding_read_the_same_bytes(tmp_path: Path) -> None:
    make_engine(tmp_path, replace(SMALL, tie_word_embeddings=True), weight_dtype="int8")
    found = locations(read(tmp_path, "target.onnx"))
    assert found["embed.weight/codes"] == found["embed.weight/rows"]


def test_drafter_refers_to_the_tables_of_the_target(tmp_path: Path) -> None:
    make_engine(tmp_path, SMALL, small_drafter(), weight_dtype="int8")
    target, block = locations(read(tmp_path, "target.onnx")), locations(read(tmp_path, "drafter_block.onnx"))
    assert block["embed.weight/rows"] == target["embed.weight/rows"]
    assert block["lm_head.weight/codes"] == target["lm_head.weight/codes"]


def test_weights_start_at_pages(tmp_path: Path) -> None:
    make_engine(tmp_path, SMALL)
    assert {int(offset) % 4096 for _, offset in locations(read(tmp_path, "target.onnx")).values()} == {0}


def test_only_attention_sees_the_padded_view(tmp_path: Path) -> None:
    """Two gathers a layer between packed and padded rows; every linear layer reads packed rows."""
    make_engine(tmp_path, SMALL, small_drafter())
    graph = read(tmp_path, "target.onnx").graph
    indices = Counter(node.input[1] for node in graph.node if node.op_type == "Gather")
    # One more gather by pad_index makes the padded positions.
    assert indices["pad_index"] == SMALL.num_layers + 1
    assert indices["pack_index"] == SMALL.num_layers
    padded = {node.output[0] for node in graph.node if node.op_type == "Gather" and node.input[1] == "pad_index"}
    assert not [node.name for node in graph.node if node.op_type == "Gemm" and node.input[0] in padded]


def test_progress_names_every_matrix_once(tmp_path: Path) -> None:
    names: list[str] = []
    write_target(tmp_path, SMALL, random_arrays(SMALL, np.random.default_rng(0)), max_seq_len=64, progress=names.append)
    assert len(names) == len(set(names)) == 4 * SMALL.num_layers + 2


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL, np.random.default_rng(0))
    del arrays["layers.1.up.weight"]
    with pytest.raises(ShapeError, match=r"layers\.1\.up\.weight"):
        write_target(tmp_path, SMALL, arrays, max_seq_len=64)


def test_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL, np.random.default_rng(0))
    arrays["layers.2.o.weight"] = np.zeros((64, 60), np.float32)
    with pytest.raises(ShapeError, match=r"layers\.2\.o\.weight.*\(64, 60\).*\(64, 64\)"):
        write_target(tmp_path, SMALL, arrays, max_seq_len=64)


def test_feature_layer_outside_the_target_is_refused(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="layers 0..2"):
        write_target(tmp_path, SMALL, arrays, max_seq_len=64, feature_layer_ids=(0, 3))


def test_unfitting_drafter_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = random_arrays(SMALL, rng)
    written = write_target(tmp_path, SMALL, arrays, max_seq_len=64)
    narrow = replace(small_drafter(), backbone=replace(small_drafter().backbone, hidden_size=32))
    source = DrafterSource(narrow, drafter_arrays(narrow, rng), SMALL, arrays, written)
    with pytest.raises(ConfigError, match="hidden size is 32"):
        write_drafter(tmp_path, source, max_seq_len=64, max_draft_len=5)
    source = DrafterSource(small_drafter(), drafter_arrays(small_drafter(), rng), SMALL, arrays, written)
    with pytest.raises(ConfigError, match=r"allows 1\.\.5"):
        write_drafter(tmp_path, source, max_seq_len=64, max_draft_len=6)


def test_equal_constants_are_stored_once_and_scalars_stay_scalars(tmp_path: Path) -> None:
    net = Network("n", WeightFile(tmp_path / "n.data"))
    assert net.scalar(1.0) == net.scalar(1.0) != net.scalar(1.0, np.int64)
    assert net.ints(3) != net.scalar(3, np.int64)
    assert [list(tensor.dims) for tensor in net.initializers] == [[], [], [1], []]


def test_name_stands_for_one_input_and_one_weight(tmp_path: Path) -> None:
    """Two models in one graph must not take each other's tensors for their own."""
    net = Network("n", WeightFile(tmp_path / "n.data"))
    assert net.input("x", np.int32, ["T"]) == net.input("x", np.int32, ["T"])
    assert len(net.inputs) == 1
    with pytest.raises(ShapeError, match="'x' is declared twice"):
        net.input("x", np.int64, ["T"])
    net.weight("w", np.zeros(3, np.float32))
    with pytest.raises(ShapeError, match="'w' is stored twice"):
        net.weight("w", np.ones(3, np.float32))
    same, other = net.shared_weight("t", np.zeros(2)), net.shared_weight("t", np.ones(2))
    assert same == net.shared_weight("t", np.zeros(2)) != other
    assert len(net.initializers) == 3


def test_stored_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    file = WeightFile(tmp_path / "n.data")
    with pytest.raises(ShapeError, match="'w' has 12 bytes"):
        file.append("w", [np.zeros(3, np.float32)], (4,), np.float32)


def test_llama3_scaling_slows_long_waves_only() -> None:
    """Values from the definition: below one of the two bounds a wave is kept or slowed by the whole factor."""
    plain = replace(SMALL, head_dim=128, rope_theta=500000.0)
    scaled = replace(plain, rope_scaling=RopeScaling(8.0, 1.0, 4.0, original_max_position_embeddings=8192))
    before, after = inverse_frequencies(plain).astype(float), inverse_frequencies(scaled).astype(float)
    for slow, fast in zip(after, before, strict=True):
        wavelength = 2 * math.pi / fast
        if wavelength < 8192 / 4:
            assert slow == pytest.approx(fast, rel=1e-6)
        elif wavelength > 8192:
            assert slow == pytest.approx(fast / 8, rel=1e-6)
        else:
            share = (8192 / wavelength - 1) / 3
            assert slow == pytest.approx(fast * (share + (1 - share) / 8), rel=1e-6)
    assert (after == before).any()
    assert (after < before / 7.9).any()


def test_rope_tables_rotate_by_position_times_speed() -> None:
    cosine, sine = rope_tables(SMALL, 700)
    assert cosine.shape == sine.shape == (700, 8)
    assert cosine[699, 0] == pytest.approx(math.cos(699), abs=1e-5)
    assert sine[10, 3] == pytest.approx(math.sin(10 * 10000 ** (-6 / 16)), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_heads_file_restores_what_was_written(dtype: str, tmp_path: Path) -> None:
    config = replace(small_drafter(), markov_head="rnn", draft_vocab_size=3)
    size, rank = SMALL.hidden_size, config.markov_rank
    arrays = drafter_arrays(config, np.random.default_rng(0))
    arrays["markov.rnn.weight"] = np.ones((3 * rank, 2 * rank + size), np.float32)
    arrays["markov.rnn.bias"] = np.arange(3 * rank, dtype=np.float32)
    kept = np.array([4, 9, 50])
    path = write_heads(
        tmp_path,
        config,
        arrays,
        vocab_size=SMALL.vocab_size,
        draft_token_ids=kept,
        weight_dtype=dtype,  # type: ignore[arg-type]
    )
    found = read_heads(path)
    for name, rows in (("markov.w1", slice(None)), ("markov.w2", kept)):
        scale = found[f"{name}.scale"][:, None] if dtype == "int8" else 1.0
        expected = arrays[f"{name}.weight"][rows]
        assert np.abs(found[name] * scale - expected).max() <= (0 if dtype == "float32" else 0.02)
    for name in ("markov.rnn.weight", "markov.rnn.bias", "confidence.weight", "confidence.bias"):
        assert np.array_equal(found[name], arrays[name])
    assert np.array_equal(found["d2t"], kept)
    assert found["d2t"].dtype == np.int64


def test_damaged_heads_file_is_an_engine_error(tmp_path: Path) -> None:
    path = tmp_path / "heads.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    path.write_bytes(path.read_bytes()[:5])
    with pytest.raises(EngineError, match="damaged"):
        read_heads(path)
