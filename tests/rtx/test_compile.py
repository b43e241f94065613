"""TensorRT-RTX's builder compiles every graph of a pair and the lint finds nothing; nothing is executed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import onnx
import pytest
from helpers import qwen3_shapes

from trtllm_dspark.build.estimate import layer_weights
from trtllm_dspark.build.tensorrt import compile_plan, engine_profiles, expect_of
from trtllm_dspark.build.tensorrt_rtx import TENSORRT_RTX
from trtllm_dspark.engine_dir import BuildLimits

pytestmark = pytest.mark.tensorrt_rtx


@pytest.mark.parametrize("architecture", ["sm89", "sm120"])
def test_pair_compiles_without_cache_copies_and_duplicated_weights(
    graphs: tuple[str, Path], limits: BuildLimits, architecture: str, tmp_path: Path
) -> None:
    name, directory = graphs
    compile_pair(name, directory, limits, architecture, tmp_path)
    shutil.rmtree(tmp_path)


def test_int8_weights_and_native_heads_compile(int8_graphs: Path, limits: BuildLimits, tmp_path: Path) -> None:
    sizes = compile_pair("qwen3_8b_2_layers-bfloat16-int8", int8_graphs, limits, "sm89", tmp_path)
    model = qwen3_shapes.TARGET
    # Two tables in 16 bits, the layers in 8.
    stored = 2 * 2 * model.vocab_size * model.hidden_size + layer_weights(model)
    assert 0.98 < sizes["target"] / stored < 1.02
    outputs = {
        value.name for value in onnx.load(int8_graphs / "drafter_block.onnx", load_external_data=False).graph.output
    }
    assert {"draft_tokens", "confidence", "base_logits", "hidden"} <= outputs
    shutil.rmtree(tmp_path)


def compile_pair(name: str, directory: Path, limits: BuildLimits, architecture: str, tmp_path: Path) -> dict[str, int]:
    """Compile the three graphs of a pair and return the bytes of their plans' weights."""
    profiles, sizes = engine_profiles(limits), {}
    for stem, wanted in (("target", profiles), ("drafter_context", profiles), ("drafter_block", profiles[:1])):
        graph, plan = directory / f"{stem}.onnx", tmp_path / f"{stem}.plan"
        told: list[float] = []
        cpu = time.process_time()
        compiled = compile_plan(TENSORRT_RTX, graph, plan, wanted, architecture, progress=told.append)
        expected = expect_of(onnx.load(graph, load_external_data=False))
        # compile_plan lints; these would notice a lint that looked at nothing.
        assert sum("_mha" in layer.name for layer in compiled.layers) == expected.num_attention * len(wanted)
        updated = {node for layer in compiled.layers for node in layer.nodes} & expected.scatters
        assert updated == expected.scatters
        assert plan.stat().st_size == compiled.size > compiled.weight_bytes > 0.98 * expected.weight_bytes
        assert told == sorted(told)
        assert told
        sizes[stem] = compiled.weight_bytes
        print(
            f"\n{name} {architecture} {stem}: plan {compiled.size / 1e6:.1f} MB, weights "
            f"{compiled.weight_bytes / 1e6:.1f} MB, activations {compiled.activation_bytes / 1e6:.1f} MB, "
            f"{len(compiled.layers)} layers, {compiled.seconds:.1f} s, "
            f"CPU {time.process_time() - cpu:.1f} s"
        )
    return sizes
