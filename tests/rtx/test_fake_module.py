"""The recording stand-in of TensorRT offers nothing that the real interface has not."""

from __future__ import annotations

import pytest
from helpers import fake_tensorrt

pytestmark = pytest.mark.tensorrt_rtx

SURFACE = {
    "Builder": ("create_network", "create_builder_config", "create_optimization_profile", "build_serialized_network"),
    "IBuilderConfig": (
        *("set_flag", "set_preview_feature", "add_optimization_profile", "create_timing_cache", "set_timing_cache"),
        *("get_timing_cache", "profiling_verbosity", "progress_monitor", "builder_optimization_level"),
    ),
    "OnnxParser": ("parse_from_file", "get_error", "num_errors"),
    "ITimingCache": ("combine", "serialize"),
    "IPluginRegistry": ("get_creator", "load_library"),
    "Runtime": ("deserialize_cuda_engine",),
    "ICudaEngine": ("create_engine_inspector", "get_engine_stat", "device_memory_size_v2"),
    "EngineInspector": ("get_engine_information",),
    "BuilderFlag": ("REFIT_IDENTICAL", "STRIP_PLAN", "WEIGHT_STREAMING"),
    "ProfilingVerbosity": ("DETAILED",),
    "PreviewFeature": ("ALIASED_PLUGIN_IO_10_03",),
    "NetworkDefinitionCreationFlag": ("STRONGLY_TYPED",),
    "LayerInformationFormat": ("JSON",),
    "EngineStat": ("TOTAL_WEIGHTS_SIZE",),
    "ILogger": ("ERROR",),
    "IProgressMonitor": (),
}


def test_stand_in_has_the_names_of_the_real_module() -> None:
    import tensorrt_rtx

    missing = [
        f"{holder}.{name}"
        for holder, names in SURFACE.items()
        for name in ("__doc__", *names)
        if not hasattr(getattr(tensorrt_rtx, holder, None), name)
    ]
    assert missing == []
    fake = fake_tensorrt.FakeTensorRt()
    public = {name for name in dir(fake) if name[0].isupper()}
    assert public <= SURFACE.keys()
    for holder, kind in (("Builder", fake_tensorrt._Builder), ("OnnxParser", fake_tensorrt._Parser)):
        assert {name for name in vars(kind) if not name.startswith("_")} <= set(SURFACE[holder])
    config = {name for name in dir(fake_tensorrt._Config(fake)) if not name.startswith("_")}
    assert config - {"flags", "features", "profiles", "cache"} == set(SURFACE["IBuilderConfig"])
