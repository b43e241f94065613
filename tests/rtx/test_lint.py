"""The lint against real builds of a small model with one fault planted each, and a whole build of a small pair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
from helpers import tiny_models
from helpers.random_model import random_arrays
from helpers.tiny_engine import SMALL

from trtllm_dspark.build import BuildConfig, build_engine, open_engine_dir
from trtllm_dspark.build.gpu_options import GpuOptions
from trtllm_dspark.build.tensorrt import Profile, compile_plan, expect_of, lint_layers, parse_layers
from trtllm_dspark.build.tensorrt.compiler import run_builder
from trtllm_dspark.build.tensorrt.layers import weight_bytes
from trtllm_dspark.build.tensorrt_rtx import TENSORRT_RTX
from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.cli.main import main
from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine_dir import read_plan_reports
from trtllm_dspark.errors import ConfigError, DsparkError, EngineError
from trtllm_dspark.graph import WeightDtype, write_target
from trtllm_dspark.graph.lowering import TrtNativeLowering
from trtllm_dspark.graph.weight_only import WEIGHT_ONLY

pytestmark = pytest.mark.tensorrt_rtx

MODEL = replace(SMALL, head_dim=64, vocab_size=8192, hidden_size=256, num_heads=8, num_kv_heads=2)
PROFILE = Profile("decode", 4, 8, 32, 32)


def write_graph(directory: Path, config: ModelConfig, dtype: Literal["float16", "float32"] = "float16") -> None:
    arrays = random_arrays(config, np.random.default_rng(0))
    lowering = TrtNativeLowering(320, dtype)
    write_target(directory, config, arrays, max_seq_len=256, weight_dtype=dtype, lowering=lowering)


def lint(directory: Path, model: onnx.ModelProto, name: str = "planted.onnx") -> None:
    (directory / name).write_bytes(model.SerializeToString())
    messages = run_builder(TENSORRT_RTX, directory / name, model, [PROFILE], "sm89").messages
    lint_layers(parse_layers(messages), expect_of(model), num_profiles=1, found_weight_bytes=weight_bytes(messages))


@pytest.fixture
def target(tmp_path: Path) -> onnx.ModelProto:
    write_graph(tmp_path, MODEL)
    return onnx.load(tmp_path / "target.onnx", load_external_data=False)


def test_untouched_graph_passes(target: onnx.ModelProto, tmp_path: Path) -> None:
    lint(tmp_path, target)


def test_unpublished_query_is_a_cache_copy(target: onnx.ModelProto, tmp_path: Path) -> None:
    kept = [value for value in target.graph.output if not value.name.startswith("query.")]
    del target.graph.output[:]
    target.graph.output.extend(kept)
    with pytest.raises(EngineError, match="a copy of a whole cache each pass"):
        lint(tmp_path, target)
    with pytest.raises(EngineError, match="that are no output"):
        compile_plan(TENSORRT_RTX, tmp_path / "planted.onnx", tmp_path / "p.plan", [PROFILE], "sm89")
    assert not (tmp_path / "p.plan").exists()


def test_standard_attention_is_noticed(target: onnx.ModelProto, tmp_path: Path) -> None:
    """What an ONNX exporter would write: the default scale multiplies the K cache."""
    for node in target.graph.node:
        if node.op_type == "TRT_Attention":
            attention = onnx.helper.make_node("Attention", list(node.input)[:3], list(node.output), name=node.name)
            attention.attribute.append(onnx.helper.make_attribute("is_causal", 1))
            node.CopyFrom(attention)
    with pytest.raises(EngineError, match="a copy of a whole cache each pass|fused kernels"):
        lint(tmp_path, target)


def test_attention_that_no_kernel_fuses_is_missed(target: onnx.ModelProto, tmp_path: Path) -> None:
    """One layer written out with a sigmoid for the softmax, which the builder would still recognise."""
    expected, make = expect_of(target), onnx.helper.make_node
    place, attention = next((i, n) for i, n in enumerate(target.graph.node) if n.op_type == "TRT_Attention")
    q, k, v = list(attention.input)[:3]
    for name, shape in (("grouped_shape", [0, 2, -1, 64]), ("heads_shape", [0, 8, -1, 64])):
        target.graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape, np.int64), name))
    written_out = [
        make("Reshape", [q, "grouped_shape"], ["grouped"], name="grouped"),
        make("Transpose", [k], ["keys"], name="keys", perm=[0, 1, 3, 2]),
        make("MatMul", ["grouped", "keys"], ["scores"], name="scores"),
        make("Sigmoid", ["scores"], ["shares"], name="shares"),
        make("MatMul", ["shares", v], ["mixed"], name="mixed"),
        make("Reshape", ["mixed", "heads_shape"], list(attention.output), name="heads"),
    ]
    del target.graph.node[place]
    for node in reversed(written_out):
        target.graph.node.insert(place, node)
    (tmp_path / "planted.onnx").write_bytes(target.SerializeToString())
    messages = run_builder(TENSORRT_RTX, tmp_path / "planted.onnx", target, [PROFILE], "sm89").messages
    with pytest.raises(EngineError, match="2 of 3 attention layers are fused kernels"):
        lint_layers(parse_layers(messages), expected, num_profiles=1, found_weight_bytes=weight_bytes(messages))


def test_ungrouped_heads_copy_the_caches(tmp_path: Path) -> None:
    """As many key heads as query heads: this builder's fused attention reads a reshaped copy of them."""
    write_graph(tmp_path, replace(MODEL, num_kv_heads=8))
    with pytest.raises(EngineError, match="a copy of a whole cache each pass"):
        compile_plan(TENSORRT_RTX, tmp_path / "target.onnx", tmp_path / "p.plan", [PROFILE], "sm89")


@pytest.mark.parametrize("weight_dtype", WEIGHT_ONLY)
def test_weight_only_matrices_stay_narrow_in_the_plan(weight_dtype: WeightDtype, tmp_path: Path) -> None:
    """A builder that dequantised constants once and for all would hold 16-bit weights: the lint would notice."""
    arrays = random_arrays(MODEL, np.random.default_rng(0))
    lowering = TrtNativeLowering(320, "bfloat16")
    write_target(tmp_path, MODEL, arrays, max_seq_len=256, weight_dtype=weight_dtype, lowering=lowering)
    graph, plan = tmp_path / "target.onnx", tmp_path / "p.plan"
    compiled = compile_plan(TENSORRT_RTX, graph, plan, [PROFILE], "sm89")
    stored = (tmp_path / "target.onnx.data").stat().st_size
    assert compiled.weight_bytes < stored * 1.02 + 4096
    layers = sum(value.size for name, value in arrays.items() if name.startswith("layers.") and value.ndim == 2)
    tables = 2 * MODEL.vocab_size * MODEL.hidden_size
    assert compiled.weight_bytes < 2 * tables + layers * {"w8a16": 1.05, "w4a16": 0.6, "fp8": 1.05}[weight_dtype]


def test_second_copy_of_the_head_is_duplicated_weights(tmp_path: Path) -> None:
    """A tied head spelled as an own initializer of the same bytes."""
    write_graph(tmp_path, replace(MODEL, tie_word_embeddings=True))
    model = onnx.load(tmp_path / "target.onnx", load_external_data=False)
    expected = expect_of(model)
    table = onnx.load(tmp_path / "target.onnx")
    embedding = next(t for t in table.graph.initializer if t.name == "embed.weight")
    turned = np.ascontiguousarray(onnx.numpy_helper.to_array(embedding).T)
    table.graph.initializer.append(onnx.numpy_helper.from_array(turned, "head"))
    (head,) = [n for n in table.graph.node if n.op_type == "Gemm" and n.input[1] == "embed.weight"]
    head.CopyFrom(onnx.helper.make_node("MatMul", [head.input[0], "head"], list(head.output), name="head_product"))
    (tmp_path / "planted.onnx").write_bytes(table.SerializeToString())
    messages = run_builder(TENSORRT_RTX, tmp_path / "planted.onnx", table, [PROFILE], "sm89").messages
    with pytest.raises(EngineError, match="the builder duplicated a matrix"):
        lint_layers(parse_layers(messages), expected, num_profiles=1, found_weight_bytes=weight_bytes(messages))


def test_copied_layers_and_projections_of_zeros_compile(tmp_path: Path) -> None:
    """What a model made deeper by copies of its layers holds: nothing in it is stored twice by the builder."""
    arrays = random_arrays(MODEL, np.random.default_rng(0))
    for name in [name for name in arrays if name.startswith("layers.0.")]:
        arrays[f"layers.1.{name.removeprefix('layers.0.')}"] = arrays[name]
    for name in ("o", "down"):
        arrays[f"layers.2.{name}.weight"] = np.zeros_like(arrays[f"layers.2.{name}.weight"])
    lowering = TrtNativeLowering(320, "float16")
    write_target(tmp_path, MODEL, arrays, max_seq_len=256, weight_dtype="float16", lowering=lowering)
    compiled = compile_plan(TENSORRT_RTX, tmp_path / "target.onnx", tmp_path / "p.plan", [PROFILE], "sm89")
    assert compiled.size == (tmp_path / "p.plan").stat().st_size


def test_graph_that_no_kernel_serves_is_refused(tmp_path: Path) -> None:
    write_graph(tmp_path, MODEL, "float32")
    model = onnx.load(tmp_path / "target.onnx", load_external_data=False)
    with pytest.raises(EngineError, match="cannot compile target.onnx"):
        run_builder(TENSORRT_RTX, tmp_path / "target.onnx", model, [PROFILE], "sm89")
    with pytest.raises(EngineError, match="no fused attention; use float16 or bfloat16"):
        compile_plan(TENSORRT_RTX, tmp_path / "target.onnx", tmp_path / "p.plan", [PROFILE], "sm89")


def test_architecture_the_builder_lacks_is_refused(target: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not compile for --gpu_architecture sm90"):
        compile_plan(TENSORRT_RTX, tmp_path / "target.onnx", tmp_path / "p.plan", [PROFILE], "sm90")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    shape = {"head_dim": 64}
    target = tiny_models.write_target(root / "target", **shape)
    return str(target), str(tiny_models.write_drafter(root / "drafter", **shape))


def test_build_writes_a_checked_directory_that_no_cpu_loads(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, told = tmp_path / "engine", []
    config = BuildConfig(
        *(pair[0], out, pair[1]),
        backend="tensorrt_rtx",
        gpu=GpuOptions(dtype="bfloat16", gpu_architectures=("sm89", "sm120"), gpu_memory_gib=1.0, workers=2),
        max_batch_size=2,
        max_seq_len=128,
        max_num_tokens=32,
    )
    report = build_engine(config, progress=lambda step, done: told.append((step, done)))
    names = {entry.name for entry in report.manifest.files}
    stems = ("target", "drafter_context", "drafter_block")
    assert {f"{stem}.{arch}.plan" for stem in stems for arch in ("sm89", "sm120")} <= names
    assert "heads.safetensors" in names
    assert not list(out.rglob("*.onnx*"))
    assert report.errors is None
    manifest = open_engine_dir(out).manifest
    assert (manifest.backend, manifest.gpu_architectures) == ("tensorrt_rtx", ("sm89", "sm120"))
    assert any(step == "compile target sm120" for step, _ in told)
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert manifest.gpu is not None
    assert (manifest.gpu.lowering, manifest.gpu.cache_len % 64) == ("trt_native", 0)
    reports = {report.plan: report for report in read_plan_reports(open_engine_dir(out))}
    assert reports.keys() == {f"{stem}.{arch}.plan" for stem in stems for arch in ("sm89", "sm120")}
    target = reports["target.sm89.plan"]
    assert [entry.profile for entry in target.profiles if entry.input == "input_ids"] == ["decode", "prefill"]
    assert sum("_mha" in layer.name for layer in target.layers) == 2 * manifest.target_config.num_layers
    capsys.readouterr()
    assert main(["inspect", "--engine_dir", str(out), "--layers"]) == 0
    shown = capsys.readouterr().out
    for text in ("profile decode", "fused attention", "past_k.0..3 bfloat16 [R, ", "_mha", "trt_native, caches of"):
        assert text in shown
    # Running it needs a GPU, its driver and cuda-python.
    with pytest.raises(DsparkError):
        load_engine(out)
    plan = out / "target.sm89.plan"
    damaged = bytearray(plan.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    plan.write_bytes(damaged)
    with pytest.raises(EngineError, match="target.sm89.plan is damaged"):
        open_engine_dir(out)


def test_failed_build_leaves_nothing(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target_checkpoint", pair[0], "--draft_checkpoint", pair[1], "--output_dir", str(tmp_path / "e")]
    flags += ["--backend", "tensorrt_rtx", "--gpu_architecture", "sm89", "--max_seq_len", "128"]
    code = main(["build", *flags, "--gpu_memory_gib", "0.001"])
    assert code == 2
    assert "the GPU has 0.001" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_device_memory_and_profiles(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target_checkpoint", pair[0], "--backend", "tensorrt_rtx", "--gpu_architecture", "sm89,sm120"]
    assert main(["build", *flags, "--max_seq_len", "128", "--dtype", "bfloat16", "--dry_run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["config"]["weight_dtype"] == "bfloat16"
    assert plan["config"]["gpu_architectures"] == ["sm89", "sm120"]
    assert [profile["name"] for profile in plan["profiles"]] == ["decode", "prefill"]
    parts = plan["device_memory"]
    assert parts.pop("total_bytes") == sum(parts.values())
