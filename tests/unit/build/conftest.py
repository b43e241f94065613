"""A tiny target and drafter on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import tiny_models

from trtllm_dspark.build import BuildConfig


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return directories of a target of 192 tokens and a drafter with blocks of five."""
    root = tmp_path_factory.mktemp("tiny")
    return tiny_models.write_target(root / "target"), tiny_models.write_drafter(root / "drafter")


@pytest.fixture
def tiny_config(tiny_pair: tuple[Path, Path], tmp_path: Path) -> BuildConfig:
    """Return a build of the tiny pair into an empty folder."""
    target, drafter = tiny_pair
    return BuildConfig(
        target_checkpoint=str(target),
        draft_checkpoint=str(drafter),
        output_dir=tmp_path / "out" / "engine",
        max_batch_size=2,
        max_seq_len=128,
        max_num_tokens=32,
    )
