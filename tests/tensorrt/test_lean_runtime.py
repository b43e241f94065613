"""TensorRT 11's own runtime takes the library that users build: load, list, create, re-create, refuse."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.kernels.plugin_harness import FIELD_FLOAT32, Harness

from trtllm_dspark.plugins import expected_contract, parse_contract, plugin_contract

VERSIONS = {name: spec.version for name, spec in parse_contract(expected_contract()).items()}
FIELDS: dict[str, list[dict[str, float]]] = {
    "DsparkMarkovDraft": [
        {"vocab": 151936, "head_kind": 1, "acceptance": 1},
        {"vocab": 49152, "head_kind": 3, "acceptance": 2, "num_candidates": 64, "int8_weights": 1, "mapped_vocab": 1},
    ],
    "DsparkConfidenceSchedule": [{"schedule_mode": 2, "markov_half": 1}, {"schedule_mode": 0, "confidence_head": 0}],
    "DsparkRaggedAccept": [{"acceptance": 0, "sampled_draft": 0}, {"acceptance": 1, "sampled_draft": 1}],
    "DsparkRaggedAttention": [{"scale": 0.125, "causal": 1}, {"scale": 0.5, "causal": 0, "kv_split": 1024}],
    "DsparkKvAppend": [{}],
}


@pytest.fixture(scope="module")
def trt() -> Any:
    return pytest.importorskip("tensorrt_lean", reason="needs TensorRT's lean runtime: pip install tensorrt-lean-cu13")


@pytest.fixture(scope="module")
def registry(trt: Any, built_plugins: Path) -> Iterator[Any]:
    registry = trt.get_plugin_registry()
    handle = registry.load_library(str(built_plugins))
    assert handle is not None
    yield registry
    registry.deregister_library(handle)


def _collection(trt: Any, fields: dict[str, float]) -> Any:
    kinds = {float: (np.float32, trt.PluginFieldType.FLOAT32), int: (np.int32, trt.PluginFieldType.INT32)}
    return trt.PluginFieldCollection(
        [
            trt.PluginField(name, np.array([value], kinds[type(value)][0]), kinds[type(value)][1])
            for name, value in fields.items()
        ]
    )


def _creator(registry: Any, name: str) -> Any:
    creator = registry.get_creator(name, VERSIONS[name], "trtllm_dspark")
    assert creator is not None, name
    return creator


def test_load_library_lists_every_creator(registry: Any, built_plugins: Path) -> None:
    ours = {creator.name: creator for creator in registry.all_creators if creator.plugin_namespace == "trtllm_dspark"}
    specs = parse_contract(plugin_contract(built_plugins))
    assert ours.keys() == specs.keys() == FIELDS.keys()
    for name, creator in ours.items():
        assert creator.plugin_version == specs[name].version
        assert creator.interface_info.kind == "PLUGIN CREATOR_V3ONE"
        assert [field.name for field in creator.field_names] == [field.name for field in specs[name].fields]


@pytest.mark.parametrize("name", FIELDS)
def test_create_plugin_has_the_capabilities_tensorrt_asks_for(trt: Any, registry: Any, name: str) -> None:
    for fields in FIELDS[name]:
        plugin = _creator(registry, name).create_plugin(name, _collection(trt, fields), trt.TensorRTPhase.BUILD)
        assert plugin is not None
        core, build, runtime = (
            plugin.get_capability_interface(kind)
            for kind in (
                trt.PluginCapabilityType.CORE,
                trt.PluginCapabilityType.BUILD,
                trt.PluginCapabilityType.RUNTIME,
            )
        )
        assert (core.plugin_name, core.plugin_version, core.plugin_namespace) == (name, VERSIONS[name], "trtllm_dspark")
        assert isinstance(build, trt.IPluginV3OneBuildV2)
        assert isinstance(runtime, trt.IPluginV3OneRuntime)
        assert build.num_outputs > 0


@pytest.mark.parametrize("name", FIELDS)
def test_recreate_plugin_from_serialised_fields_keeps_them(
    trt: Any, registry: Any, built_plugins: Path, name: str
) -> None:
    """TensorRT's Python API does not show a C++ plugin's fields, so the harness reads them from the same library."""
    harness = Harness(built_plugins)
    spec = parse_contract(plugin_contract(built_plugins))[name]
    for fields in FIELDS[name]:
        stored = harness.create(name, fields).text("harness_fields")
        recreated: dict[str, float] = {}
        for line in stored.splitlines():
            field, kind, length, value = line.split()
            assert length == "1"
            recreated[field] = float(value) if int(kind) == FIELD_FLOAT32 else int(value)
        assert recreated == spec.complete(fields)
        plugin = _creator(registry, name).create_plugin(name, _collection(trt, recreated), trt.TensorRTPhase.RUNTIME)
        assert plugin is not None
        metadata = plugin.get_capability_interface(trt.PluginCapabilityType.BUILD).metadata_string
        assert (metadata or "").split() == [f"{key}={value:g}" for key, value in recreated.items()]


def test_create_plugin_bad_field_is_refused_with_our_message(trt: Any, registry: Any, built_plugins: Path) -> None:
    last_error = ctypes.CDLL(str(built_plugins)).dspark_plugin_last_error
    last_error.restype = ctypes.c_char_p
    for name, fields, message in (
        ("DsparkRaggedAttention", {"scale": 0.1}, "field 'causal' is missing"),
        ("DsparkRaggedAttention", {"scale": 1, "causal": 1}, "field 'scale': expected kFLOAT32 x 1, got kINT32 x 1"),
        ("DsparkMarkovDraft", {"vocab": 0}, "field 'vocab': expected a value in [1, 1048576], got 0"),
    ):
        created = _creator(registry, name).create_plugin(name, _collection(trt, fields), trt.TensorRTPhase.BUILD)
        assert created is None
        assert last_error().decode() == f"{name}: {message}"


def test_load_library_twice_is_refused_by_tensorrt(registry: Any, built_plugins: Path) -> None:
    """TensorRT's rule, which the runtime must know: a second load returns nothing."""
    assert registry.load_library(str(built_plugins)) is None
