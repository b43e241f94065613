"""A tiny target, a tiny drafter and sequences that the target could have generated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_models import write_drafter, write_target

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from trtllm_dspark.checkpoint import Checkpoint, load_target  # noqa: E402
from trtllm_dspark.train.responses import Response  # noqa: E402


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_dir: Path) -> Checkpoint:
    return load_target(target_dir)


@pytest.fixture(scope="session")
def responses() -> list[Response]:
    rng = np.random.default_rng(0)
    lengths = [(9, 21), (12, 30), (9, 11), (10, 26), (11, 33), (9, 24)]
    common = tuple(range(10, 18))
    return [
        Response("x", 0.0, start, (*common, *map(int, rng.integers(4, 192, length - 8)))) for start, length in lengths
    ]


@pytest.fixture(params=["none", "vanilla", "gated", "rnn"])
def drafter_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter", markov_head=request.param)
