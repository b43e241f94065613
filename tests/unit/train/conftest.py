"""A tiny target with a tokenizer, sequences for it, and the smallest run that is still a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_models import write_drafter, write_target
from helpers.toy_tokenizer import tokenizer_json

from trtllm_dspark.checkpoint import Checkpoint, load_target
from trtllm_dspark.train.responses import Response

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from helpers.training import small_config

    from trtllm_dspark.train.pipeline import TrainConfig

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}a:"


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target whose tokens are bytes."""
    directory = write_target(tmp_path_factory.mktemp("target"), vocab_size=256, eos_token_id=0, pad_token_id=2)
    (directory / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return directory


@pytest.fixture(scope="session")
def target(target_dir: Path) -> Checkpoint:
    return load_target(target_dir)


@pytest.fixture(scope="session")
def responses() -> list[Response]:
    """Return sequences with a common beginning, one of them too short for a block."""
    rng = np.random.default_rng(0)
    lengths = [(11, 21), (12, 30), (10, 12), (11, 26), (13, 33), (11, 24)]
    common = tuple(range(10, 19))
    return [
        Response("x", 0.0, start, (*common, *map(int, rng.integers(4, 256, length - 9))), index)
        for index, (start, length) in enumerate(lengths)
    ]


@pytest.fixture(params=["none", "vanilla", "gated", "rnn"])
def drafter_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter", markov_head=request.param, vocab_size=256)


@pytest.fixture
def config(target_dir: Path, tmp_path: Path) -> TrainConfig:
    return small_config(target_dir, tmp_path / "out")
