"""A drafter that ships copies of its target's embedding and head does not bring them into the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers.tiny_models import drafter_config, drafter_tensors, write_directory

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.build.plan import plan_build
from trtllm_dspark.checkpoint import load_target


@pytest.fixture
def copies(tiny_config: BuildConfig, tmp_path: Path) -> dict[str, np.ndarray]:
    """Return a drafter's tensors, embedding and head those of the target."""
    arrays = load_target(tiny_config.target_checkpoint).arrays
    tensors = drafter_tensors(drafter_config(), seed=1, own_embed=True, own_lm_head=True)
    return tensors | {"embed_tokens.weight": arrays["embed.weight"], "lm_head.weight": arrays["lm_head.weight"]}


def with_drafter(config: BuildConfig, folder: Path, tensors: dict[str, np.ndarray]) -> BuildConfig:
    return replace(config, draft_checkpoint=str(write_directory(folder, drafter_config(), tensors)))


def test_build_stores_equal_tables_once(
    tiny_config: BuildConfig, copies: dict[str, np.ndarray], tmp_path: Path
) -> None:
    config = with_drafter(tiny_config, tmp_path / "copies", copies)
    build_engine(config)
    block = onnx.load(config.output_dir / "drafter_block.onnx", load_external_data=False)
    files = {
        tensor.name.partition("/")[0]: entry.value
        for tensor in block.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert files["embed.weight"] == files["lm_head.weight"] == "target.onnx.data"


def test_plan_keeps_a_table_that_differs(
    tiny_config: BuildConfig, copies: dict[str, np.ndarray], tmp_path: Path
) -> None:
    copies["lm_head.weight"] = copies["lm_head.weight"].copy()
    copies["lm_head.weight"][-1, -1] += 1
    drafter = plan_build(with_drafter(tiny_config, tmp_path / "other", copies)).drafter
    assert drafter is not None
    assert (drafter.shares_embedding, drafter.shares_lm_head) == (True, False)
