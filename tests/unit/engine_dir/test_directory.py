"""Opening an engine directory finds every kind of damage and says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.engine_files import WEIGHTS, fill_engine_dir

from trtllm_dspark.engine_dir import SCHEMA_VERSION, Manifest, open_engine_dir
from trtllm_dspark.errors import EngineError


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    fill_engine_dir(tmp_path / "engine")
    return tmp_path / "engine"


def edit(engine: Path, **changes: object) -> None:
    raw = json.loads((engine / "manifest.json").read_text())
    (engine / "manifest.json").write_text(json.dumps({**raw, **changes}))


def test_open_untouched_directory_returns_equal_manifest(tmp_path: Path) -> None:
    written = fill_engine_dir(tmp_path / "engine")
    opened = open_engine_dir(tmp_path / "engine")
    assert opened.manifest == written
    assert opened.manifest.engine_hash == written.engine_hash
    assert opened.file(WEIGHTS) == tmp_path / "engine" / WEIGHTS
    assert opened.optional_file("drafter_block.onnx") is None


def test_open_unlisted_file_is_refused(engine: Path) -> None:
    with pytest.raises(EngineError, match=r"has no heads\.safetensors; build the engine again"):
        open_engine_dir(engine).file("heads.safetensors")


def test_open_missing_directory_names_the_build_command(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not exist; make it with: trtllm-dspark build"):
        open_engine_dir(tmp_path / "none")


def test_open_other_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is no engine directory"):
        open_engine_dir(tmp_path)


def test_open_flipped_byte_is_found_by_hash(engine: Path) -> None:
    content = bytearray((engine / WEIGHTS).read_bytes())
    content[3] ^= 1
    (engine / WEIGHTS).write_bytes(content)
    with pytest.raises(EngineError, match=f"{WEIGHTS} is damaged .*copy it again or build again"):
        open_engine_dir(engine)
    open_engine_dir(engine, verify_hashes=False)


def test_open_truncated_file_is_found_by_size(engine: Path) -> None:
    (engine / WEIGHTS).write_bytes(b"weight")
    with pytest.raises(EngineError, match="has 6 bytes, expected 7"):
        open_engine_dir(engine, verify_hashes=False)


def test_open_missing_file_is_named(engine: Path) -> None:
    (engine / WEIGHTS).unlink()
    with pytest.raises(EngineError, match=f"{WEIGHTS} is missing"):
        open_engine_dir(engine)


def test_open_other_schema_version_says_build_again(engine: Path) -> None:
    edit(engine, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(EngineError, match=r"has schema version 2, this version reads 1; build the engine again"):
        open_engine_dir(engine)


@pytest.mark.parametrize("version", [True, 1.0, "1", None])
def test_open_schema_version_that_is_no_integer_is_refused(engine: Path, version: object) -> None:
    edit(engine, schema_version=version)
    with pytest.raises(EngineError, match=f"has schema version {version!r}, this version reads 1"):
        open_engine_dir(engine)


def test_open_foreign_json_is_refused(engine: Path) -> None:
    (engine / "manifest.json").write_text('{"schema": "other"}')
    with pytest.raises(EngineError, match="is not the manifest of a trtllm-dspark engine"):
        open_engine_dir(engine)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "null", "[" * 100_000])
def test_open_broken_manifest_is_one_sentence(engine: Path, text: str) -> None:
    (engine / "manifest.json").write_text(text)
    with pytest.raises(EngineError, match=r"build the engine again|give the --output_dir"):
        open_engine_dir(engine)


def test_open_binary_manifest_is_refused(engine: Path) -> None:
    (engine / "manifest.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(EngineError, match="cannot be read"):
        open_engine_dir(engine)


def test_open_edited_limit_is_found_by_engine_hash(engine: Path) -> None:
    edit(engine, limits={"max_batch_size": 99, "max_seq_len": 64, "max_num_tokens": 16, "max_draft_len": 4})
    with pytest.raises(EngineError, match="was changed after the build"):
        open_engine_dir(engine)


@pytest.mark.parametrize("field", ["backend", "limits", "target", "files", "tools"])
def test_open_manifest_without_a_field_names_it(engine: Path, field: str) -> None:
    edit(engine, **{field: None})
    with pytest.raises(EngineError, match=f"field '{field}' must be"):
        open_engine_dir(engine)


def test_open_file_outside_the_directory_is_refused(engine: Path) -> None:
    (engine.parent / "secret").write_bytes(b"x")
    manifest = open_engine_dir(engine).manifest
    entry = manifest.files[0].__class__("../secret", 1, "0" * 64)
    forged = Manifest(
        **{name: getattr(manifest, name) for name in Manifest.__slots__ if name != "files"},
        files=(entry,),
    )
    (engine / "manifest.json").write_text(forged.to_json())
    with pytest.raises(EngineError, match="lies outside the engine"):
        open_engine_dir(engine)


def test_engine_hash_ignores_tool_versions_and_sees_files(tmp_path: Path) -> None:
    one = fill_engine_dir(tmp_path / "one", b"weights")
    two = fill_engine_dir(tmp_path / "two", b"Weights")
    assert one.engine_hash != two.engine_hash
    two.tools["onnx"] = "2.0"
    assert two.engine_hash == fill_engine_dir(tmp_path / "three", b"Weights").engine_hash
