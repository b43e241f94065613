"""Loading an engine directory with plans: what is refused, and in which words."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.recording_device import GraphPlan, RecordingDevice
from helpers.tiny_tensorrt import Written

from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.tensorrt._cuda import CudaDevice, _load_kernels, import_cuda
from trtllm_dspark.engine.tensorrt._plans import import_runtime
from trtllm_dspark.engine.tensorrt.load import load_tensorrt
from trtllm_dspark.engine_dir import BuildLimits, EngineDirectory, FileEntry, GpuBuild, Manifest, ModelEntry
from trtllm_dspark.engine_process.opening import SessionOptions, open_session
from trtllm_dspark.errors import ConfigError, DeviceError, EngineError, EngineMismatch, NativeError
from trtllm_dspark.graph import HEADS_FILE
from trtllm_dspark.runtime import Session

NATIVE = GpuBuild("trt_native", 128)


def directory(pair: Written, path: Path, **changes: Any) -> EngineDirectory:
    """An engine directory as a build would have described it."""
    names = [f"{name}.sm89.plan" for name in pair.sessions] + [HEADS_FILE]
    limits = pair.limits
    manifest = Manifest(
        backend="tensorrt_rtx",
        limits=BuildLimits(limits.max_batch_size, limits.max_seq_len, limits.max_num_tokens, limits.max_draft_len),
        target=ModelEntry("float16", ()),
        target_config=pair.target,
        drafter=ModelEntry("float16", ()),
        drafter_config=pair.drafter,
        files=tuple(FileEntry(name, 1, "0" * 64) for name in names),
        tools={},
        gpu_architectures=("sm89", "sm120"),
        gpu=NATIVE,
    )
    return EngineDirectory(path, replace(manifest, **changes))


def open_with(pair: Written, device: RecordingDevice) -> Any:
    device.plans = {name: GraphPlan(device, name, session, pair.profiles) for name, session in pair.sessions.items()}
    return lambda backend, kernels, plugins: device


def test_load_finds_the_plans_of_this_gpu(toy_weights: Written) -> None:
    device = RecordingDevice(heads=toy_weights.heads)
    engine = load_tensorrt(
        directory(toy_weights, toy_weights.directory), toy_weights.limits, open_device=open_with(toy_weights, device)
    )
    assert engine.rounds_in_flight == 2
    assert engine.device_name == device.name
    assert engine.heads.has_confidence
    engine.close()
    engine.close()
    assert device.closed == 1
    assert all(plan.closed for plan in device.plans.values())
    with pytest.raises(DeviceError, match="the engine is closed"):
        engine.collect_round(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_architectures": ("sm120",)}, "plans for sm120, this GPU is a recording device .sm89.; build with"),
        (
            {"gpu": GpuBuild("trt_plugin", 128)},
            "call plugins; give their library, --kernel_library DIR/libtrtllm_dspark_plugins.so",
        ),
        ({"gpu": None}, "by an older version, .* runs plans of trt_native and trt_plugin; build the engine again"),
        ({"gpu": replace(NATIVE, strip_plan=True)}, "hold no weights and this runtime does not refit them"),
        ({"gpu": replace(NATIVE, weight_streaming=True)}, "sets no budget for it; .* again without --weight_streaming"),
        ({"files": ()}, "has no target.sm89.plan; build the engine again"),
    ],
)
def test_load_refuses_what_it_cannot_run(toy_weights: Written, changes: dict[str, Any], message: str) -> None:
    device = RecordingDevice(heads=toy_weights.heads)
    with pytest.raises(EngineError, match=message):
        load_tensorrt(
            directory(toy_weights, toy_weights.directory, **changes),
            toy_weights.limits,
            open_device=open_with(toy_weights, device),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_batch_size": 5}, "the plan takes 4 requests, the engine says 5"),
        ({"max_seq_len": 400}, "caches hold 128 tokens, the engine's limits need"),
        ({"max_draft_len": 2}, "base_logits of the block's plan has extents .*, the engine says .2, 256."),
        ({"draft_vocab_size": 7}, "base_logits of the block's plan has extents"),
    ],
)
def test_load_plans_of_other_limits_are_refused(toy_weights: Written, change: dict[str, int], message: str) -> None:
    device = RecordingDevice(heads=toy_weights.heads)
    with pytest.raises(EngineError, match=message):
        load_tensorrt(
            directory(toy_weights, toy_weights.directory),
            replace(toy_weights.limits, **change),
            open_device=open_with(toy_weights, device),
        )
    assert device.closed == 1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logits", {"dtype": "float16"}, "logits of the plan is float16, this version reads float32"),
        ("input_ids", {"dtype": "int32"}, "input_ids of the plan is int32, this version reads int64"),
        ("present_k.0", {"aliases": "past_v.0"}, "present_k.0 of the plan updates 'past_v.0', not 'past_k.0'"),
        ("past_k.1", {"dtype": "float16"}, "a plan's caches must be alike"),
        ("pad_index", {"name": None}, "the target's plan has no tensor 'pad_index'"),
    ],
)
def test_load_plans_with_other_tensors_are_refused(
    toy_weights: Written, name: str, change: dict[str, Any], message: str
) -> None:
    device = RecordingDevice(heads=toy_weights.heads)
    opener = open_with(toy_weights, device)
    tensors = dict(device.plans["target"].tensors)
    tensors[name] = replace(tensors[name], **change)
    if "name" in change:
        del tensors[name]
    device.plans["target"].tensors = tensors
    with pytest.raises(EngineError, match=message):
        load_tensorrt(directory(toy_weights, toy_weights.directory), toy_weights.limits, open_device=opener)


def test_load_without_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "tensorrt"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DeviceError, match=r"needs cuda-python .*; pip install 'cuda-bindings>=13,<14'"):
        CudaDevice("tensorrt")
    with pytest.raises(DeviceError, match=r"the engine needs tensorrt .*pip install '.\[tensorrt\]' in a checkout"):
        import_runtime("tensorrt")
    with pytest.raises(DeviceError, match="has no TensorRT runtime"):
        import_runtime("onnxruntime")


def test_load_kernel_library_of_another_version_is_refused(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "round_commit" in _load_kernels(kernels).ops
    with pytest.raises(NativeError, match="is not a kernel library"):
        _load_kernels(Path(__file__))
    from trtllm_dspark.engine.tensorrt import _cuda

    monkeypatch.setattr(_cuda, "ROUND_FIELDS", frozenset({("round_caps", "live"), ("round_caps", "later")}))
    with pytest.raises(EngineMismatch, match="the kernel 'round_caps' of .* is of another version; build it again"):
        _load_kernels(kernels)
    monkeypatch.setattr(_cuda, "ROUND_OPS", frozenset({"round_begin", "round_trip"}))
    with pytest.raises(EngineMismatch, match="has no kernel 'round_trip'; build it again"):
        _load_kernels(kernels)


def test_cuda_names_are_those_of_the_installed_package() -> None:
    """Every runtime function and constant this package uses exists in cuda-python, where that is installed."""
    try:
        runtime = import_cuda()
    except DeviceError as error:
        pytest.skip(str(error))
    import re

    from trtllm_dspark.engine.tensorrt import _cuda

    source = Path(_cuda.__file__).read_text()
    for name in sorted(set(re.findall(r"_cuda\.(cuda\w+)", source))):
        assert hasattr(runtime, name), name


def test_kernel_library_for_a_cpu_engine_is_refused(toy_engine_dir: Path, kernels: Path) -> None:
    with pytest.raises(ConfigError, match="runs on a CPU, which has no use for a kernel library; leave it out"):
        load_engine(toy_engine_dir, kernel_library=kernels)
    with pytest.raises(ConfigError, match="leave it out"):
        Session.open(toy_engine_dir, kernel_library=kernels)
    options = SessionOptions(2, "off", "rejection", kernel_library=kernels)
    with pytest.raises(ConfigError, match="leave it out"):
        open_session(toy_engine_dir, options)
