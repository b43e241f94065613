import json
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_models import write_target

from trtllm_dspark.checkpoint import load_target
from trtllm_dspark.checkpoint.safetensors_io import read_directory, read_file, read_json, write_file
from trtllm_dspark.errors import CheckpointError


def _rewrite_header(path: Path, old: str, new: str) -> None:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].decode().replace(old, new)
    assert header != raw[8 : 8 + length].decode()
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + raw[8 + length :])


def test_write_then_read_returns_equal_values_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {
        "f32": np.array([[1.5, -2.0]], np.float32),
        "f16": np.array([0.25, 3], np.float16),
        "i8": np.array([[-128, 127]], np.int8),
        "i64": np.array([1 << 40], np.int64),
        "bool": np.array([True, False]),
        "bf16": np.array([0x3F80, 0xC000], np.uint16),
        "scalar": np.array(2.0, np.float32),
    }
    write_file(path, tensors, bfloat16=frozenset({"bf16"}))
    read = {name: tensor.read() for name, tensor in read_file(path).items()}
    assert read.keys() == tensors.keys()
    np.testing.assert_array_equal(read.pop("bf16"), np.array([1.0, -2.0], np.float32))
    for name, values in read.items():
        np.testing.assert_array_equal(values, tensors[name])


def test_written_file_is_read_by_safetensors_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="needs the package safetensors")
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(3, dtype=np.int8)}
    write_file(tmp_path / "x.safetensors", tensors)
    read = library.load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(read[name], values)


def test_write_unknown_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor x of dtype complex64"):
        write_file(tmp_path / "x.safetensors", {"x": np.ones(1, np.complex64)})


@pytest.mark.parametrize("size", [0, 7, 8, 40])
def test_read_file_without_whole_header_is_refused(tmp_path: Path, size: int) -> None:
    write_file(tmp_path / "x.safetensors", {"x": np.ones(4, np.float32)})
    path = tmp_path / "y.safetensors"
    path.write_bytes((tmp_path / "x.safetensors").read_bytes()[:size])
    with pytest.raises(CheckpointError, match="damaged"):
        read_file(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"shape":[4]', '"shape":[5]', "has 16 bytes, its shape needs 20"),
        ('"dtype":"F32"', '"dtype":"F8_E4M3"', "dtype F8_E4M3"),
        ("[0,16]", "[16,0]", "bytes"),
        ("[0,16]", "[-8,8]", "bytes"),
        ("[0,16]", "[16,32]", "runs past its end"),
        ('"shape":[4]', '"shape":"4x"', "cannot be read"),
        ('"shape":[4],', "", "cannot be read"),
        ('"dtype"', '"dtype', "not JSON"),
        ('"shape":[4]', '"shape":[-2,-2]', "damaged"),
    ],
)
def test_read_file_bad_header_entry_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"x": np.ones(4, np.float32)})
    _rewrite_header(path, old, new)
    with pytest.raises(CheckpointError, match=message):
        read_file(path)


@pytest.mark.parametrize("header", [b"[1, 2]", b"7777", b'"x"', b"[" * 100_000])
def test_read_file_header_that_is_no_object_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="damaged"):
        read_file(path)


def test_read_file_cut_short_is_refused_by_tensor_name(tmp_path: Path) -> None:
    path = write_target(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"cut short: tensor model\.norm\.weight"):
        load_target(tmp_path)


def test_read_tensor_after_file_shrank_is_refused(tmp_path: Path) -> None:
    arrays = load_target(write_target(tmp_path)).arrays
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="became shorter"):
        arrays["norm.weight"]


def test_read_directory_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    write_target(tmp_path, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors"):
        read_directory(tmp_path)


@pytest.mark.parametrize("misplaced", [True, False])
def test_read_directory_index_and_shards_disagree_is_refused(tmp_path: Path, misplaced: bool) -> None:
    index = write_target(tmp_path, num_shards=2) / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    first, second = sorted(set(document["weight_map"].values()))
    name = next(name for name, shard in document["weight_map"].items() if shard == first)
    if misplaced:
        document["weight_map"][name] = second
    else:
        del document["weight_map"][name]
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_directory(tmp_path)


def test_read_directory_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    index = {"weight_map": {"x": "../x.safetensors"}}
    write_file(tmp_path / "x.safetensors", {"x": np.ones(1, np.float32)})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not in"):
        read_directory(tmp_path / "model")


def test_read_directory_only_pickled_weights_names_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which is not read"):
        read_directory(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[1]", "must hold a JSON object")])
def test_read_json_bad_document_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_json(tmp_path / "config.json")
