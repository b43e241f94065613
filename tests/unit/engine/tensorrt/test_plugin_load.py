"""Loading engines with plugins: the library, its creators, the plans' tensors; what is refused, and in which words."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_tensorrt import FakeTensorRt
from helpers.plugin_engine import PluginWritten, plugin_plans
from helpers.plugin_heads import CoreHeads
from helpers.recording_device import RecordingDevice
from helpers.stub_libraries import plugin_library

from trtllm_dspark.engine.base import ContextBatch, TokenBatch
from trtllm_dspark.engine.tensorrt import _cuda
from trtllm_dspark.engine.tensorrt._plans import TensorRtRuntime
from trtllm_dspark.engine.tensorrt.load import load_tensorrt
from trtllm_dspark.engine_dir import BuildLimits, EngineDirectory, FileEntry, GpuBuild, Manifest, ModelEntry
from trtllm_dspark.errors import DeviceError, EngineError
from trtllm_dspark.plugins import contract_hash, expected_contract, parse_contract

HASH = contract_hash(expected_contract())
BUILD = GpuBuild("trt_plugin", 128, HASH, acceptance="coupled", schedule="threshold", num_candidates=0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plugin_library(tmp_path_factory.mktemp("library") / "plugins.so", expected_contract())


@pytest.fixture
def written(plugin_graphs: Callable[[str, str, str], PluginWritten]) -> PluginWritten:
    return plugin_graphs("toy", "coupled", "threshold")


@pytest.fixture
def device(written: PluginWritten) -> RecordingDevice:
    device = RecordingDevice(heads=written.pair.heads)
    device.plans = plugin_plans(device, written, CoreHeads())
    return device


def directory(written: PluginWritten, **changes: Any) -> EngineDirectory:
    """An engine directory as a build would have described it."""
    limits = written.pair.limits
    manifest = Manifest(
        backend="tensorrt",
        limits=BuildLimits(limits.max_batch_size, limits.max_seq_len, limits.max_num_tokens, limits.max_draft_len),
        target=ModelEntry("float16", ()),
        target_config=written.pair.target,
        drafter=ModelEntry("float16", ()),
        drafter_config=written.pair.drafter,
        files=tuple(FileEntry(f"{name}.sm89.plan", 1, "0" * 64) for name in ("target", "drafter")),
        tools={},
        gpu_architectures=("sm89",),
        gpu=replace(BUILD, **changes),
    )
    return EngineDirectory(written.pair.directory, manifest)


def load(written: PluginWritten, device: RecordingDevice, library: Path | None, **changes: Any) -> Any:
    asked: list[tuple[Any, ...]] = []

    def open_device(*arguments: Any) -> RecordingDevice:
        asked.append(arguments)
        return device

    limits = replace(written.pair.limits, **changes.pop("limits", {}))
    engine = load_tensorrt(directory(written, **changes), limits, kernel_library=library, open_device=open_device)
    assert asked == [("tensorrt", library, True)]
    return engine


def test_load_runs_whole_rounds_and_nothing_else(
    written: PluginWritten, device: RecordingDevice, library: Path
) -> None:
    engine = load(written, device, library)
    assert (engine.rounds_in_flight, engine.max_banned, engine.greedy_only) == (2, 0, False)
    assert engine.heads.has_confidence
    one = np.zeros(1, np.int64)
    for call in (
        lambda: engine.verify(TokenBatch(one, one + 1, one, one)),
        lambda: engine.absorb(ContextBatch(np.zeros((1, 4), np.float32), one + 1, one)),
        lambda: engine.draft_block(one, one),
    ):
        with pytest.raises(DeviceError, match="whole rounds only, .* build the engine with --dspark_plugin disable"):
            call()
    engine.close()
    engine.close()
    assert device.closed == 1
    assert all(plan.closed for plan in device.plans.values())


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (None, "call plugins; give their library, --kernel_library DIR/libtrtllm_dspark_plugins.so"),
        ("", "--kernel_library .* does not exist; make the library of this version with: trtllm-dspark build_plugins"),
        ("no library", "is not the trtllm_dspark plugin library"),
        (("Accept version 1", "Accept version 7"), "has DsparkRaggedAccept version 7, graphs need version 1; make the"),
        (("::DsparkKvAppend version", "::Other version"), "--kernel_library .* has no plugin DsparkKvAppend; make the"),
    ],
    ids=["none", "missing", "text", "version", "plugin"],
)
def test_load_library_that_does_not_fit_is_refused(
    written: PluginWritten, device: RecordingDevice, tmp_path: Path, contract: Any, message: str
) -> None:
    path = None if contract is None else tmp_path / "plugins.so"
    if path is not None and contract == "no library":
        path.write_text("text")
    elif path is not None and contract:
        plugin_library(path, expected_contract().replace(*contract))
    with pytest.raises(EngineError, match=message):
        load(written, device, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"plugin_contract": "1" * 64},
            "plugins of another version .contract 111111111111; .*plugins.so has",
        ),
        (
            {"plugin_contract": None},
            "another version .contract none; .* again with --dspark_plugin_library",
        ),
        ({"schedule": "best"}, "the engine's schedule is 'best', which this version does not know; build it again"),
        ({"acceptance": None}, "the engine's acceptance is 'none', which this version does not know"),
        ({"strip_plan": True}, "hold no weights and this runtime does not refit them"),
        ({"limits": {"max_batch_size": 5}}, "plan takes 4 requests, the engine says 5; build the engine again"),
        ({"limits": {"max_seq_len": 400}}, "caches hold 128 tokens, the engine's limits need 400"),
        (
            {"limits": {"max_draft_len": 2}},
            "out_tokens .* extents .-1, 8., the engine says .-1, 3.; build the",
        ),
        (
            {"limits": {"max_num_tokens": 99}},
            "step_time_us .* has extents .33., the engine says .100.",
        ),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_load_engine_that_does_not_fit_is_refused(
    written: PluginWritten, device: RecordingDevice, library: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        load(written, device, library, **changes)


@pytest.mark.parametrize(
    ("plan", "name", "change", "message"),
    [
        ("target", "logits", {"dtype": "int32"}, "logits of the target's plan are int32, not a float type"),
        ("target", "input_ids", {"dtype": "int64"}, "input_ids of the plan is int64, this version reads int32"),
        ("drafter", "terms", {"dtype": "float16"}, "terms of the plan is float16, this version reads float32"),
        (
            "drafter",
            "page_table",
            {"shape": (-1, 2)},
            "page_table .* extents .-1, 2., the engine says .-1, 1.",
        ),
        ("target", "past_k.0", {"shape": (3, 2, 128, 16)}, "past_k.0 of the plan holds 3 slots, the engine says 4"),
        (
            "target",
            "present_k.0",
            {"aliases": "past_v.0"},
            "present_k.0 of the plan updates 'past_v.0', not",
        ),
        ("target", "past_v.1", {"dtype": "float16"}, "a plan's caches must be alike"),
        ("target", "cu_logits", None, "the target's plan has no tensor 'cu_logits': this is no plan of the trt_plugin"),
        ("drafter", "more", {}, "the drafter's plan has a tensor 'more' this version does not know"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_load_plans_with_other_tensors_are_refused(
    written: PluginWritten,
    device: RecordingDevice,
    library: Path,
    plan: str,
    name: str,
    change: dict[str, Any] | None,
    message: str,
) -> None:
    tensors = dict(device.plans[plan].tensors)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = replace(tensors.get(name, tensors["page_table"]), **change)
    device.plans[plan].tensors = tensors
    with pytest.raises(EngineError, match=message):
        load(written, device, library)
    assert device.closed == 1


def test_load_outputs_of_unknown_extents_are_taken(
    written: PluginWritten, device: RecordingDevice, library: Path
) -> None:
    """A builder may not know what a plugin's outputs measure; inputs of the other plan tell."""
    tensors = dict(device.plans["drafter"].tensors)
    for name, tensor in tensors.items():
        if not tensor.is_input and not name.startswith("present_"):
            tensors[name] = replace(tensor, shape=(-1,) * len(tensor.shape))
    device.plans["drafter"].tensors = tensors
    engine = load(written, device, library)
    assert engine.rounds_in_flight == 2
    engine.close()


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRt:
    module = FakeTensorRt()
    module.library_plugins = {(s.name, s.version, s.namespace) for s in parse_contract(expected_contract()).values()}
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


def test_runtime_knows_the_creators_before_it_reads_a_plan(trt: FakeTensorRt, library: Path) -> None:
    TensorRtRuntime("tensorrt", library)
    TensorRtRuntime("tensorrt", library)
    assert trt.loaded_libraries == [str(library)], "once a process"
    assert trt.known_plugins == trt.library_plugins


def test_runtime_without_plugins_loads_no_library(trt: FakeTensorRt) -> None:
    TensorRtRuntime("tensorrt")
    assert trt.loaded_libraries == []


@pytest.mark.parametrize("lost", [entry.name for entry in parse_contract(expected_contract()).values()])
def test_runtime_without_a_creator_is_refused(trt: FakeTensorRt, library: Path, lost: str) -> None:
    trt.library_plugins = {entry for entry in trt.library_plugins if entry[0] != lost}
    with pytest.raises(EngineError, match=f"TensorRT finds no {lost} version . in .*; make the library"):
        TensorRtRuntime("tensorrt", library)


def test_runtime_that_cannot_load_the_library_is_refused(trt: FakeTensorRt, library: Path) -> None:
    trt.library_plugins = set()
    with pytest.raises(EngineError, match="TensorRT cannot load --kernel_library .*; make the library of this version"):
        TensorRtRuntime("tensorrt", library)


@pytest.mark.parametrize("plugins", [True, False])
def test_device_registers_the_library_where_plans_call_it(
    trt: FakeTensorRt, library: Path, monkeypatch: pytest.MonkeyPatch, plugins: bool
) -> None:
    properties = SimpleNamespace(name=b"GPU", major=8, minor=9)
    cuda = SimpleNamespace(
        cudaGetDeviceCount=lambda: (0, 1),
        cudaSetDevice=lambda index: (0,),
        cudaGetDeviceProperties=lambda index: (0, properties),
    )
    monkeypatch.setattr(_cuda, "import_cuda", lambda: cuda)
    monkeypatch.setattr(_cuda, "_load_kernels", lambda path: logging)
    device = _cuda.CudaDevice("tensorrt", library, plugins)
    assert device.architecture == "sm89"
    assert trt.loaded_libraries == ([str(library)] if plugins else [])
