"""Tables of an engine that is replaced while they are made never land in its successor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_files import fill_engine_dir

from trtllm_dspark.engine_dir import EngineDirectory, open_engine_dir, side_table, stage_directory, write_side_table
from trtllm_dspark.errors import DeviceError, EngineMismatch


@pytest.fixture
def engine(tmp_path: Path) -> EngineDirectory:
    fill_engine_dir(tmp_path / "engine", b"one")
    return open_engine_dir(tmp_path / "engine")


def build_another(engine: EngineDirectory) -> None:
    with stage_directory(engine.path, overwrite=True) as staged:
        fill_engine_dir(staged.path, b"two")
        staged.publish()


def write(engine: EngineDirectory) -> Path:
    return write_side_table(engine, "table.json", schema="s", version=1, content={"x": 1})


def test_table_is_written_beside_the_manifest(engine: EngineDirectory) -> None:
    path = write(engine)
    head = {"schema": "s", "schema_version": 1, "engine_hash": engine.manifest.engine_hash}
    assert json.loads(path.read_text()) == {**head, "x": 1}
    assert path.stat().st_mode & 0o777 == (engine.path / "manifest.json").stat().st_mode & 0o777


def test_table_of_a_replaced_engine_is_refused(engine: EngineDirectory) -> None:
    build_another(engine)
    with pytest.raises(EngineMismatch, match="another engine was built at .* meanwhile; run the command again"):
        write(engine)
    assert sorted(os.listdir(engine.path)) == ["manifest.json", "target.onnx", "target.onnx.data"]
    write(open_engine_dir(engine.path))


def test_engine_replaced_in_the_middle_of_the_write_gets_no_table(
    engine: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Json:
        load = staticmethod(json.load)

        @staticmethod
        def dump(*arguments: Any, **options: Any) -> None:
            build_another(engine)
            json.dump(*arguments, **options)

    monkeypatch.setattr(side_table, "json", Json)
    with pytest.raises(DeviceError, match="table.json cannot be written"):
        write(engine)
    assert sorted(os.listdir(engine.path)) == ["manifest.json", "target.onnx", "target.onnx.data"]


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000])
def test_table_beside_a_damaged_manifest_is_refused(engine: EngineDirectory, text: str) -> None:
    (engine.path / "manifest.json").write_text(text)
    with pytest.raises(EngineMismatch, match="was not written"):
        write(engine)


def test_table_of_an_engine_that_is_gone_is_one_sentence(engine: EngineDirectory) -> None:
    engine.path.rename(engine.path.with_name("elsewhere"))
    with pytest.raises(DeviceError, match="table.json cannot be written .No such file or directory."):
        write(engine)
