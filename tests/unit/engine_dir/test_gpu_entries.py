"""What a manifest says of GPU plans, and the reports beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.engine_files import fill_engine_dir

from trtllm_dspark.engine_dir import (
    Binding,
    GpuBuild,
    Layer,
    Manifest,
    PlanReport,
    ShapeRange,
    describe_file,
    open_engine_dir,
    read_plan_reports,
    write_plan_report,
)
from trtllm_dspark.errors import EngineError

GPU = GpuBuild("trt_plugin", 2112, "ab" * 32, False, True, "rejection", "early_stop", 0)
REPORT = PlanReport(
    plan="target.sm90.plan",
    architecture="sm90",
    weight_bytes=7,
    activation_bytes=9,
    profiles=(ShapeRange("decode", "input_ids", (1,), (4,), (8,)),),
    bindings=(Binding("input_ids", "input", "int64", ("T",)),),
    layers=(Layer("a", "kgen", ("y [-1, 64]",)),),
)


def gpu_manifest(directory: Path) -> Manifest:
    manifest = fill_engine_dir(directory)
    return replace(manifest, backend="tensorrt", gpu_architectures=("sm90",), gpu=GPU)


def test_gpu_build_survives_the_manifest_and_enters_its_hash(tmp_path: Path) -> None:
    manifest = gpu_manifest(tmp_path / "e")
    read = Manifest.from_json(manifest.to_json(), where="m")
    assert read == manifest
    other = replace(manifest, gpu=replace(GPU, plugin_contract="cd" * 32))
    assert other.engine_hash != manifest.engine_hash


def test_manifest_of_a_cpu_engine_says_nothing_of_gpus(tmp_path: Path) -> None:
    raw = json.loads(fill_engine_dir(tmp_path / "e").to_json())
    assert not {"gpu", "gpu_architectures"} & raw.keys()
    assert "dtype" not in raw["target"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lowering", "other", "'lowering' must be one of trt_native, trt_plugin"),
        ("cache_len", True, "'cache_len' must be an integer"),
        ("strip_plan", 1, "'strip_plan' must be true or false"),
        ("plugin_contract", 5, "'plugin_contract' must be a string"),
    ],
)
def test_damaged_gpu_build_names_the_field(field: str, value: object, message: str, tmp_path: Path) -> None:
    raw = json.loads(gpu_manifest(tmp_path / "e").to_json())
    raw["gpu"][field] = value
    with pytest.raises(EngineError, match=message):
        Manifest.from_json(json.dumps(raw), where="m")


def engine_with_report(directory: Path) -> Path:
    manifest = gpu_manifest(directory)
    path = write_plan_report(directory, REPORT)
    manifest = replace(manifest, files=(*manifest.files, describe_file(path, directory)))
    (directory / "manifest.json").write_text(manifest.to_json())
    return path


def test_plan_report_is_read_back(tmp_path: Path) -> None:
    path = engine_with_report(tmp_path / "e")
    assert path.name == "target.sm90.layers.json"
    assert read_plan_reports(open_engine_dir(tmp_path / "e")) == (REPORT,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "has schema version 2, this version reads 1; build the engine again"),
        ({"schema_version": True}, "has schema version True"),
        ({"schema": "x"}, "is not a trtllm_dspark.plan_report file; build the engine again"),
        ({"layers": [{"name": "a", "kind": "b", "outputs": [1]}]}, "'outputs' must be a list of strings"),
    ],
)
def test_plan_report_of_another_form_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = engine_with_report(tmp_path / "e")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(EngineError, match=message):
        read_plan_reports(open_engine_dir_without_hashes(tmp_path / "e"))


def open_engine_dir_without_hashes(path: Path) -> object:
    from trtllm_dspark.engine_dir.directory import EngineDirectory

    return EngineDirectory(path, Manifest.from_json((path / "manifest.json").read_text(), where="m"))
