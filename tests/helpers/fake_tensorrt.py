"""A recording stand-in for the Python module of TensorRT 11: what it is asked, and layers as it would list them.

It fuses nothing. A test plants what a builder might have done with `planted`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx


class Memory(bytes):
    """Serialized bytes, as IHostMemory: with a length in bytes."""

    @property
    def nbytes(self) -> int:
        return len(self)

    def serialize(self) -> Memory:
        return self


class TimingCache(Memory):
    """A timing cache whose content shows what went in."""

    parts: tuple[bytes, ...] = ()

    def combine(self, other: TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.parts += (bytes(other),)
        return True

    def serialize(self) -> Memory:
        return Memory(bytes(self) + b"+".join(self.parts))


def _layer(name: str, kind: str, outputs: list[tuple[str, list[int]]], nodes: list[str]) -> dict[str, Any]:
    return {
        "Name": name,
        "LayerType": kind,
        "Inputs": [],
        "Outputs": [{"Name": tensor, "Dimensions": dims, "Format/Datatype": "Half"} for tensor, dims in outputs],
        "Metadata": "".join(f"[ONNX Layer: {node}]" for node in nodes),
    }


def list_layers(model: onnx.ModelProto, num_profiles: int) -> list[dict[str, Any]]:
    """Return one layer a node that the lint looks at, a profile."""
    dims = {
        value.name: [dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim] for value in model.graph.output
    }
    layers = []
    for profile in range(num_profiles):
        suffix = f" [profile {profile}]" if profile else ""
        for node in model.graph.node:
            outputs = [(f"{name}{suffix}", dims.get(name, [-1, -1])) for name in node.output]
            if node.domain == "trtllm_dspark":
                layers.append(_layer(node.name, "PluginV3", outputs, []))
            elif node.op_type == "TRT_Attention":
                layers.append(_layer(f"_gemm_mha_v2_myl{profile}_{node.name}", "kgen", outputs, [node.name]))
            elif node.op_type == "TensorScatter":
                layers.append(_layer(f"__myl_Scat_{node.name}", "kgen", outputs, [node.name]))
        layers.append(_layer(f"__myl_Fc_{profile}", "gemm", [("logits", [-1, 192])], []))
    return layers


class FakeTensorRt:
    """The module; install it as `sys.modules["tensorrt"]`."""

    __version__ = "11.4.0.106"

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self.profiles: list[list[dict[str, tuple[tuple[int, ...], ...]]]] = []
        self.networks: list[int] = []
        self.graphs: list[str] = []
        self.loaded_libraries: list[str] = []
        self.planted: list[dict[str, Any]] = []
        self.information: str | None = None
        self.parse_errors: list[str] = []
        self.build_error: str | None = None
        self.accepts_profiles = True
        self.accepts_timing_cache = True
        self.known_plugins: set[tuple[str, str, str]] = set()
        self.library_plugins: set[tuple[str, str, str]] = set()
        self._models: dict[bytes, tuple[onnx.ModelProto, int]] = {}
        flags = ("REFIT_IDENTICAL", "STRIP_PLAN", "WEIGHT_STREAMING")
        self.BuilderFlag = SimpleNamespace(**{name: name for name in flags})
        self.ProfilingVerbosity = SimpleNamespace(DETAILED="DETAILED")
        self.PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="ALIASED_PLUGIN_IO_10_03")
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
        self.LayerInformationFormat = SimpleNamespace(JSON="JSON")
        self.EngineStat = SimpleNamespace(TOTAL_WEIGHTS_SIZE="TOTAL_WEIGHTS_SIZE")
        self.ILogger = type("ILogger", (), {"ERROR": 1, "__init__": lambda self: None})
        self.IProgressMonitor = type("IProgressMonitor", (), {"__init__": lambda self: None})

    def Builder(self, logger: Any) -> Any:
        return _Builder(self, logger)

    def OnnxParser(self, network: Any, logger: Any) -> Any:
        return _Parser(self, network)

    def Runtime(self, logger: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=self._engine)

    def get_plugin_registry(self) -> Any:
        def creator(name: str, version: str, namespace: str) -> object | None:
            return object() if (name, version, namespace) in self.known_plugins else None

        def load(path: str) -> object | None:
            self.loaded_libraries.append(path)
            self.known_plugins |= self.library_plugins
            return object() if self.library_plugins else None

        return SimpleNamespace(get_creator=creator, load_library=load)

    def _engine(self, plan: bytes) -> Any:
        model, num_profiles = self._models[bytes(plan)]
        layers = list_layers(model, num_profiles) + self.planted
        text = json.dumps({"Layers": layers, "Bindings": []}) if self.information is None else self.information
        lengths = [int(e.value) for t in model.graph.initializer for e in t.external_data if e.key == "length"]
        inspector = SimpleNamespace(get_engine_information=lambda form: text)
        return SimpleNamespace(
            create_engine_inspector=lambda: inspector,
            get_engine_stat=lambda stat: sum(lengths),
            device_memory_size_v2=4096,
        )


class _Config:
    def __init__(self, trt: FakeTensorRt) -> None:
        self._trt = trt
        self.profiling_verbosity = self.progress_monitor = None
        self.builder_optimization_level = 3
        self.flags: list[str] = []
        self.features: list[tuple[str, bool]] = []
        self.profiles: list[dict[str, tuple[tuple[int, ...], ...]]] = []
        self.cache: TimingCache | None = None

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)

    def set_preview_feature(self, feature: str, on: bool) -> None:
        self.features.append((feature, on))

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1 if self._trt.accepts_profiles else -1

    def create_timing_cache(self, content: bytes) -> TimingCache:
        return TimingCache(content)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return self._trt.accepts_timing_cache

    def get_timing_cache(self) -> TimingCache:
        assert self.cache is not None
        return TimingCache(bytes(self.cache) + b"*")


class _Builder:
    def __init__(self, trt: FakeTensorRt, logger: Any) -> None:
        self._trt, self._logger = trt, logger

    def create_network(self, flags: int) -> Any:
        self._trt.networks.append(flags)
        return SimpleNamespace(path=None)

    def create_builder_config(self) -> _Config:
        return _Config(self._trt)

    def create_optimization_profile(self) -> Any:
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {}

        def set_shape(name: str, low: tuple[int, ...], tuned: tuple[int, ...], high: tuple[int, ...]) -> None:
            assert all(a <= b <= c for a, b, c in zip(low, tuned, high, strict=True)), (name, low, tuned, high)
            shapes[name] = (low, tuned, high)

        return SimpleNamespace(shapes=shapes, set_shape=set_shape)

    def build_serialized_network(self, network: Any, config: _Config) -> Memory | None:
        trt = self._trt
        trt.configs.append(config)
        trt.profiles.append(config.profiles)
        if trt.build_error is not None:
            self._logger.log(1, trt.build_error)
            return None
        monitor = config.progress_monitor
        if monitor is not None:
            monitor.phase_start("Building engine", None, 4)
            monitor.phase_start("tactics", "Building engine", 100)
            for step in range(4):
                assert monitor.step_complete("Building engine", step)
            monitor.phase_finish("Building engine")
        plan = Memory(f"plan of {Path(network.path).name} {len(trt.configs)}".encode())
        trt._models[bytes(plan)] = (onnx.load(network.path, load_external_data=False), len(config.profiles))
        return plan


class _Parser:
    def __init__(self, trt: FakeTensorRt, network: Any) -> None:
        self._trt, self._network = trt, network
        self.num_errors = len(trt.parse_errors)

    def parse_from_file(self, path: str) -> bool:
        self._network.path = path
        self._trt.graphs.append(Path(path).name)
        return not self._trt.parse_errors

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(desc=lambda: self._trt.parse_errors[index])
