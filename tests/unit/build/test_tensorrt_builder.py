"""`--backend tensorrt` against a recording module: what is asked of the builder, what its answers are checked for."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from helpers import tiny_models
from helpers.fake_tensorrt import FakeTensorRt, TimingCache
from helpers.stub_libraries import cuda_driver, plugin_library

from trtllm_dspark.build import BuildConfig, build_engine, gpu_plans, open_engine_dir, plan
from trtllm_dspark.build._choices import ACCEPTANCES, SCHEDULES
from trtllm_dspark.build.gpu_options import GpuOptions
from trtllm_dspark.build.gpus import Gpu
from trtllm_dspark.build.report import StepClock
from trtllm_dspark.build.tensorrt import CompilerJob
from trtllm_dspark.build.tensorrt.device import find_device
from trtllm_dspark.build.tensorrt.inspector import parse_inspector
from trtllm_dspark.checkpoint.safetensors_io import read_file, write_file
from trtllm_dspark.engine.tensorrt.load import NATIVE as NATIVE_LOWERING
from trtllm_dspark.engine_dir import GpuBuild, read_plan_reports
from trtllm_dspark.errors import ConfigError, DeviceError, EngineError
from trtllm_dspark.graph.round_options import Acceptance, Schedule
from trtllm_dspark.plugins import (
    check_plugin_library,
    contract_hash,
    expected_contract,
    parse_contract,
    register_plugins,
)

H100 = Gpu("NVIDIA H100", "sm90", 80 << 30)
NATIVE = GpuOptions(dspark_plugin="disable")
FLAG = "--dspark_plugin_library"


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRt:
    """Install the module and a GPU."""
    module = FakeTensorRt()
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(plan, "find_device", lambda: H100)
    monkeypatch.setattr(gpu_plans, "find_device", lambda: H100)
    return module


@pytest.fixture
def config(tiny_config: BuildConfig) -> BuildConfig:
    return replace(tiny_config, backend="tensorrt", gpu=NATIVE)


@pytest.fixture
def library(trt: FakeTensorRt, tmp_path: Path) -> Path:
    specs = parse_contract(expected_contract()).values()
    trt.library_plugins = {(spec.name, spec.version, spec.namespace) for spec in specs}
    return plugin_library(tmp_path / "plugins.so", expected_contract())


def with_options(config: BuildConfig, **options: Any) -> BuildConfig:
    return replace(config, gpu=replace(config.gpu, **options))


def test_native_build_asks_for_typed_networks_two_profiles_and_detail(trt: FakeTensorRt, config: BuildConfig) -> None:
    told: list[tuple[str, float]] = []
    report = build_engine(config, progress=lambda step, done: told.append((step, done)))
    assert trt.graphs == ["target.onnx", "drafter_context.onnx", "drafter_block.onnx"]
    assert set(trt.networks) == {1 << 1}
    assert {c.profiling_verbosity for c in trt.configs} == {"DETAILED"}
    assert all(c.flags == [] and c.features == [] and c.builder_optimization_level == 3 for c in trt.configs)
    assert not trt.loaded_libraries
    decode, prefill = trt.profiles[0]
    # 2 requests, blocks of 5, 32 tokens a pass.
    assert decode["pad_index"] == ((1, 1), (2, 6), (2, 6))
    assert decode["input_ids"] == ((1,), (12,), (12,))
    assert prefill["pad_index"] == ((1, 1), (2, 32), (2, 32))
    assert prefill["logit_rows"] == ((1,), (2,), (2,))
    assert [len(profiles) for profiles in trt.profiles] == [2, 2, 1]
    fractions = [done for step, done in told if step == "compile target sm90"]
    assert len(set(fractions)) >= 4
    manifest = open_engine_dir(config.output_dir).manifest
    assert manifest == report.manifest
    assert (manifest.backend, manifest.gpu_architectures) == ("tensorrt", ("sm90",))
    assert manifest.gpu == GpuBuild("trt_native", 192)
    assert manifest.target.dtype == "float16"
    assert manifest.tools["tensorrt_cu13"] == trt.__version__
    assert {f"{stem}.sm90.plan" for stem in ("target", "drafter_context", "drafter_block")} <= {
        entry.name for entry in manifest.files
    }


def test_plugin_build_has_one_plan_a_draft_and_one_a_verify(
    trt: FakeTensorRt, config: BuildConfig, library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(
        config,
        gpu=GpuOptions(dspark_plugin="enable", dspark_plugin_library=library, acceptance="coupled", num_candidates=16),
    )
    # The attention plugin has heads of 64 and 128.
    with pytest.raises(ConfigError, match="the attention plugin has head dimensions 64 and 128"):
        build_engine(config)
    root = library.parent
    config = replace(
        config,
        target_checkpoint=str(tiny_models.write_target(root / "target", head_dim=64)),
        draft_checkpoint=str(tiny_models.write_drafter(root / "drafter", head_dim=64)),
    )
    caplog.clear()
    build_engine(config)
    assert not _not_run(caplog)
    assert trt.graphs == ["target.onnx", "drafter.onnx"]
    assert all(c.features == [("ALIASED_PLUGIN_IO_10_03", True)] for c in trt.configs)
    assert trt.loaded_libraries == [str(library)]
    verify, draft = trt.profiles
    assert verify[0]["cu_tokens"] == ((2,), (3,), (3,))
    assert verify[0]["token_request"] == ((1,), (12,), (12,))
    assert draft[0]["anchors"] == ((1,), (2,), (2,))
    manifest = open_engine_dir(config.output_dir).manifest
    contract = contract_hash(expected_contract())
    gpu = GpuBuild(*("trt_plugin", 192, contract), acceptance="coupled", schedule="threshold", num_candidates=16)
    assert manifest.gpu == gpu
    names = {entry.name for entry in manifest.files}
    assert {"target.sm90.plan", "drafter.sm90.plan", "drafter.sm90.layers.json"} <= names
    assert "heads.safetensors" not in names
    kinds = {layer.kind for report in read_plan_reports(open_engine_dir(config.output_dir)) for layer in report.layers}
    assert "PluginV3" in kinds


def _not_run(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings that an engine is built and not run."""
    return [entry.message for entry in caplog.records if "it does not run them" in entry.message]


def test_tensorrt_build_is_of_native_layers_unless_told_otherwise(
    trt: FakeTensorRt, config: BuildConfig, caplog: pytest.LogCaptureFixture
) -> None:
    build_engine(replace(config, gpu=GpuOptions()))
    manifest = open_engine_dir(config.output_dir).manifest
    assert manifest.gpu is not None
    assert manifest.gpu.lowering == NATIVE_LOWERING
    assert not _not_run(caplog)


def test_target_with_copied_layers_and_a_copy_of_its_embedding_is_built(
    trt: FakeTensorRt, config: BuildConfig, tmp_path: Path
) -> None:
    """Made deeper by copies of layers; stored untied, with the head that it had when it was tied."""
    shape = {"hidden_size": 256, "head_dim": 64, "vocab_size": 512}
    weights = tiny_models.write_target(tmp_path / "target", **shape) / "model.safetensors"
    tensors = {name: tensor.read() for name, tensor in read_file(weights).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name.replace(".layers.1.", ".layers.2.")] = tensors[name]
    write_file(weights, tensors)
    drafter = tiny_models.write_drafter(tmp_path / "drafter", own_embed=True, own_lm_head=True, **shape)
    manifest = build_engine(
        replace(config, target_checkpoint=str(weights.parent), draft_checkpoint=str(drafter))
    ).manifest
    assert manifest.target_config.tie_word_embeddings
    assert trt.graphs == ["target.onnx", "drafter_context.onnx", "drafter_block.onnx"]


def test_compiler_process_that_dies_is_one_sentence() -> None:
    """As the kernel ends one where memory runs out; `SimpleNamespace` stands for a job."""
    job = cast(CompilerJob, SimpleNamespace(run=partial(os._exit, 9)))
    clock = StepClock({"one": 1.0, "two": 1.0}, None)
    with pytest.raises(DeviceError, match="a compiler process was killed, probably .* lower --workers"):
        gpu_plans._run([job, job], ["one", "two"], clock, workers=2)


def test_dropped_plugin_is_refused(trt: FakeTensorRt, config: BuildConfig) -> None:
    trt.planted = [{"Name": "extra", "LayerType": "PluginV3", "Inputs": [], "Outputs": [], "Metadata": ""}]
    with pytest.raises(EngineError, match="the plan has 1 plugin layers, its graph calls for 0"):
        build_engine(config)
    assert not config.output_dir.exists()


def test_builder_flags_reach_the_builder(
    trt: FakeTensorRt, config: BuildConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier, later = tmp_path / "model.cache", tmp_path / "next.cache"
    earlier.write_bytes(b"old")
    options: dict[str, Any] = {"strip_plan": True, "weight_streaming": True, "fast_build": True, "opt_num_tokens": 4}
    config = with_options(config, **options, input_timing_cache=earlier, output_timing_cache=later)
    told: list[tuple[str, int]] = []
    build_engine(config, progress=lambda step, done: told.append((step, len(_not_run(caplog)))))
    for used in trt.configs:
        assert used.flags == ["REFIT_IDENTICAL", "STRIP_PLAN", "WEIGHT_STREAMING"]
        assert used.builder_optimization_level == 1
        assert used.cache == TimingCache(b"old")
    assert later.read_bytes() == b"old*+old*+old*"
    decode, prefill = trt.profiles[0]
    assert decode["input_ids"] == ((1,), (4,), (12,))
    assert prefill["pad_index"] == ((1, 1), (2, 4), (2, 32))
    manifest = open_engine_dir(config.output_dir).manifest
    assert manifest.gpu is not None
    assert (manifest.gpu.strip_plan, manifest.gpu.weight_streaming) == (True, True)
    names = "stripped plans and plans with weight streaming"
    # Once, before the first plan is compiled.
    assert _not_run(caplog) == [f"this version builds and inspects {names}, it does not run them"]
    assert {count for step, count in told if step.startswith("compile")} == {1}
    # A stripped plan is refitted from its graph.
    assert {"graphs/target.onnx", "graphs/target.onnx.data"} <= {entry.name for entry in manifest.files}


def test_output_timing_cache_alone_starts_from_nothing(trt: FakeTensorRt, config: BuildConfig, tmp_path: Path) -> None:
    later = tmp_path / "next.cache"
    build_engine(with_options(replace(config, draft_checkpoint=None), output_timing_cache=later))
    assert later.read_bytes() == b"*"
    assert trt.configs[0].cache == TimingCache(b"")


def test_builds_differ_by_their_precision(trt: FakeTensorRt, config: BuildConfig) -> None:
    config = with_options(replace(config, weight_dtype="int8"), dtype="float16", draft_dtype="bfloat16")
    manifest = build_engine(config).manifest
    assert manifest.drafter is not None
    assert (manifest.target.dtype, manifest.target.weight_dtype) == ("float16", "int8")
    assert (manifest.drafter.dtype, manifest.drafter.weight_dtype) == ("bfloat16", "bfloat16")


def copy_of_a_cache() -> dict[str, Any]:
    tensor = {"Name": "__mye7", "Dimensions": [-1, 4, 192, 16], "Format/Datatype": "Half"}
    return {"Name": "__myl_TranRepl", "LayerType": "kgen", "Inputs": [], "Outputs": [tensor], "Metadata": ""}


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({"planted": [copy_of_a_cache()]}, EngineError, "a copy of a whole cache each pass"),
        ({"information": '{"Layers": [{"Name": "x"}]}'}, EngineError, "inspector's layers cannot be read"),
        ({"information": "no layer information"}, EngineError, "inspector's layers cannot be read"),
        ({"information": '{"Layers": []}'}, EngineError, "the inspector lists no layer"),
        ({"parse_errors": ["unsupported node X"]}, EngineError, "TensorRT's parser refuses target.onnx: unsupported"),
        ({"build_error": "out of memory"}, EngineError, "TensorRT cannot compile target.onnx: out of memory"),
        ({"accepts_profiles": False}, ConfigError, "TensorRT refuses the decode profile; lower --max_batch_size"),
        ({"__version__": "10.9.0"}, DeviceError, r"TensorRT 10.9.0 is installed, .* install '.\[tensorrt\]' in"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_fault_is_refused_and_leaves_nothing(
    trt: FakeTensorRt, config: BuildConfig, fault: dict[str, Any], error: type[Exception], message: str
) -> None:
    for name, value in fault.items():
        setattr(trt, name, value)
    with pytest.raises(error, match=message):
        build_engine(config)
    assert not config.output_dir.exists()


def test_timing_cache_of_another_gpu_is_refused(trt: FakeTensorRt, config: BuildConfig, tmp_path: Path) -> None:
    cache = tmp_path / "model.cache"
    cache.write_bytes(b"other")
    trt.accepts_timing_cache = False
    with pytest.raises(ConfigError, match="--input_timing_cache is of another GPU or another TensorRT version"):
        build_engine(with_options(config, input_timing_cache=cache))


def test_builder_that_cannot_start_is_one_sentence(
    trt: FakeTensorRt, config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def builder(logger: Any) -> Any:
        logger.log(1, "CUDA initialization failure with error: 2")
        raise TypeError("factory function returned nullptr")

    monkeypatch.setattr(trt, "Builder", builder)
    with pytest.raises(DeviceError, match="TensorRT cannot start .CUDA initialization failure with error: 2."):
        build_engine(config)


def test_other_gpu_than_asked_for_is_refused(trt: FakeTensorRt, config: BuildConfig) -> None:
    with pytest.raises(ConfigError, match=r"compiles for the GPU it runs on, here NVIDIA H100 \(sm90\), not sm89"):
        build_engine(with_options(config, gpu="RTX 4090"))


def test_gpu_of_this_machine_without_the_plugins_kernels_is_refused(
    trt: FakeTensorRt, config: BuildConfig, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "find_device", lambda: replace(H100, architecture="sm121"))
    with pytest.raises(ConfigError, match="the plugin library is compiled for .*, not for sm121; use --dspark_plugin"):
        build_engine(replace(config, gpu=GpuOptions(dspark_plugin="enable", dspark_plugin_library=library)))
    monkeypatch.setattr(plan, "find_device", lambda: replace(H100, architecture="sm80"))
    with pytest.raises(ConfigError, match="--weight_dtype fp8 needs sm89 or .*; sm80 has int8"):
        build_engine(replace(config, weight_dtype="fp8"))


def test_plugin_build_without_a_drafter_verifies_only(trt: FakeTensorRt, config: BuildConfig, library: Path) -> None:
    target = tiny_models.write_target(library.parent / "target", head_dim=64)
    gpu = GpuOptions(dspark_plugin="enable", dspark_plugin_library=library, acceptance="greedy")
    build_engine(replace(config, target_checkpoint=str(target), draft_checkpoint=None, gpu=gpu))
    assert trt.graphs == ["target.onnx"]
    assert "draft_tokens" not in trt.profiles[0][0]


def test_engine_larger_than_this_machines_gpu_is_refused(
    trt: FakeTensorRt, config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "find_device", lambda: replace(H100, memory_bytes=1 << 20))
    with pytest.raises(ConfigError, match="the GPU has 0.0009766"):
        build_engine(config)


def test_without_the_module_the_extra_is_named(
    trt: FakeTensorRt, config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(
        DeviceError, match=r"--backend tensorrt needs TensorRT .* install '.\[tensorrt\]' in a checkout"
    ):
        build_engine(config)
    assert not config.output_dir.parent.exists()


def test_without_a_driver_the_other_backend_is_named() -> None:
    with pytest.raises(DeviceError, match="this machine shows none; build where that GPU is, or use --backend"):
        find_device("libno_such_driver.so.1")


def test_find_device_asks_the_driver(tmp_path: Path) -> None:
    driver = cuda_driver(tmp_path / "libcuda.so", major=8, minor=9, memory=24 << 30, name="Stub RTX")
    assert find_device(str(driver)) == Gpu("Stub RTX", "sm89", 24 << 30)
    broken = cuda_driver(tmp_path / "broken.so", major=8, minor=9, memory=1, error=100)
    with pytest.raises(DeviceError, match=r"shows none; .* \(cuInit gives error 100\)"):
        find_device(str(broken))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("DsparkRaggedAttention version 1", "DsparkRaggedAttention version 2", "has DsparkRaggedAttention version 2,"),
        ("::DsparkKvAppend version", "::DsparkKvWrite version", "has no plugin DsparkKvAppend"),
        ("kv_split", "kv_piece", "was built from other sources .it lacks the line"),
        ("  field vocab int32 [1, 1048576]", "  field vocab", "tells a contract that cannot be read"),
    ],
)
def test_plugin_library_of_another_contract_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    contract = expected_contract()
    assert old in contract
    library = plugin_library(tmp_path / "plugins.so", contract.replace(old, new))
    with pytest.raises(EngineError, match=f"{message}.*trtllm-dspark build_plugins --output_dir"):
        check_plugin_library(library, FLAG)


def test_plugin_library_with_more_than_the_contract_is_refused(tmp_path: Path) -> None:
    library = plugin_library(tmp_path / "plugins.so", expected_contract() + "plugin trtllm_dspark::More version 1\n")
    with pytest.raises(EngineError, match="it promises more than the graphs know"):
        check_plugin_library(library, FLAG)


def test_plugin_library_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere.so does not exist; make the library of this version with"):
        check_plugin_library(tmp_path / "nowhere.so", FLAG)
    (tmp_path / "text.so").write_text("x")
    with pytest.raises(EngineError, match="is not the trtllm_dspark plugin library"):
        check_plugin_library(tmp_path / "text.so", FLAG)


def test_plugin_library_is_checked_before_anything_is_written(
    trt: FakeTensorRt, config: BuildConfig, tmp_path: Path
) -> None:
    library = plugin_library(tmp_path / "plugins.so", expected_contract().replace("version 1", "version 2"))
    with pytest.raises(EngineError, match="version 2, graphs need version 1"):
        build_engine(replace(config, gpu=GpuOptions(dspark_plugin="enable", dspark_plugin_library=library)))
    assert not trt.graphs
    assert not config.output_dir.parent.exists()


def test_registry_without_the_plugins_is_refused(trt: FakeTensorRt, config: BuildConfig, library: Path) -> None:
    everything = trt.library_plugins
    trt.library_plugins = set()
    with pytest.raises(EngineError, match="TensorRT cannot load"):
        register_plugins(trt, library, FLAG)
    trt.library_plugins = set(list(everything)[1:])
    with pytest.raises(EngineError, match="TensorRT finds no Dspark"):
        register_plugins(trt, library, FLAG)


def test_choices_are_those_of_the_graphs() -> None:
    assert get_args(Acceptance) == ACCEPTANCES
    assert get_args(Schedule) == SCHEDULES


def test_parse_inspector_reads_both_spellings_of_extents() -> None:
    text = '{"Layers": [{"Name": "a", "LayerType": "kgen", "Outputs": [{"Name": "y [profile 1]", "Dimensions": '
    for dims in ("[-1, 64]", '"[-1,64]"'):
        (layer,) = parse_inspector(text + dims + '}], "Metadata": "[ONNX Layer: n1][ONNX Layer: n2]"}]}')
        assert (layer.outputs[0].name, layer.outputs[0].dims) == ("y", (-1, 64))
        assert layer.nodes == ("n1", "n2")
