"""`inspect`: what engines of every backend show, and what their flags refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers import tiny_models
from helpers.fake_tensorrt import FakeTensorRt

from trtllm_dspark.build import BuildConfig, build_engine, gpu_plans, plan
from trtllm_dspark.build.gpu_options import GpuOptions
from trtllm_dspark.build.gpus import Gpu
from trtllm_dspark.cli.main import main

LIMITS = {"max_batch_size": 2, "max_seq_len": 128, "max_num_tokens": 32}


@pytest.fixture(scope="module")
def cpu_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cpu")
    target, drafter = tiny_models.write_target(root / "t"), tiny_models.write_drafter(root / "d")
    build_engine(BuildConfig(str(target), root / "e", str(drafter), **LIMITS))
    return root / "e"


@pytest.fixture
def gpu_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRt())
    for module in (plan, gpu_plans):
        monkeypatch.setattr(module, "find_device", lambda: Gpu("NVIDIA H100", "sm90", 80 << 30))
    target = tiny_models.write_target(tmp_path / "t")
    options = GpuOptions(dspark_plugin="disable", dtype="bfloat16", weight_streaming=True)
    build_engine(
        BuildConfig(str(target), tmp_path / "e", backend="tensorrt", weight_dtype="int8", gpu=options, **LIMITS)
    )
    return tmp_path / "e"


def inspect(engine: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["inspect", "--engine_dir", str(engine), *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plans_show_memory_bindings_profiles_and_layers(gpu_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = inspect(gpu_engine, capsys=capsys)
    assert code == 0
    for text in (
        "tensorrt for sm90",
        "weights int8 in bfloat16",
        "trt_native, caches of 192 tokens, weight streaming",
        "input_ids int64 [T]",
        "past_k.0..3 bfloat16 [R, 2, 192, 16]",
        "profile decode   input_ids [1..2]",
        "profile prefill  input_ids [1..32]",
        "8 fused attention",
        "activations 4.1 kB",
    ):
        assert text in shown, shown
    assert "_gemm_mha" not in shown


def test_layers_are_listed_one_a_line(gpu_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, shown, _ = inspect(gpu_engine, "--layers", capsys=capsys)
    assert len([line for line in shown.splitlines() if "_gemm_mha" in line]) == 8
    assert "present_k.0 [-1, 2, 192, 16]" in shown


def test_plans_are_printed_as_json(gpu_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, shown, _ = inspect(gpu_engine, "--json", "--plans", capsys=capsys)
    (report,) = json.loads(shown)
    assert (report["plan"], report["architecture"]) == ("target.sm90.plan", "sm90")
    assert {"decode", "prefill"} == {entry["profile"] for entry in report["profiles"]}


def test_graphs_of_a_cpu_engine_show_bindings_and_nodes(cpu_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = inspect(cpu_engine, capsys=capsys)
    assert code == 0
    assert "past_k.0..3 float32 [R, 2, C, 16]" in shown
    assert "17 MatMulNBits" in shown


def test_flags_that_mean_nothing_are_refused(cpu_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = inspect(cpu_engine, "--layers", capsys=capsys)
    assert (code, "--layers is for the table of a GPU engine" in error) == (2, True)
    code, _, error = inspect(cpu_engine, "--plans", capsys=capsys)
    assert (code, "--plans is for --json" in error) == (2, True)
