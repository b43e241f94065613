"""One SmolLM2 engine for every test here; it is kept between runs (`pytest --cache-clear` drops it)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.smollm2 import EVAL_PROMPTS, NO_EVAL_PROMPTS, demo_prompts, read_jsonl, smollm2_engine

from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import Engine
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.runtime import Tokenizer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.smollm2)


@pytest.fixture(scope="session")
def smollm2_engine_dir(request: pytest.FixtureRequest) -> Path:
    """Return the engine directory of SmolLM2 with the demo's drafter."""
    return smollm2_engine(request.config.cache.mkdir("trtllm_dspark"))


@pytest.fixture(scope="session")
def engine(smollm2_engine_dir: Path) -> Iterator[Engine]:
    """Return the loaded engine; tests take turns with it."""
    engine = load_engine(smollm2_engine_dir, num_threads=2)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def tokenizer(smollm2_engine_dir: Path) -> Tokenizer:
    """Return its tokenizer."""
    return Tokenizer.open(open_engine_dir(smollm2_engine_dir))


@pytest.fixture(scope="session")
def demo_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the demo's prompts as token ids."""
    return [tokenizer.encode_chat([{"role": "user", "content": row["prompt"]}]) for row in demo_prompts()]


@pytest.fixture(scope="session")
def eval_ids(tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """Return (domain, token ids) of the evaluation prompts."""
    if not EVAL_PROMPTS.exists():
        pytest.skip(NO_EVAL_PROMPTS)
    rows = read_jsonl(EVAL_PROMPTS)
    return [(row["domain"], tokenizer.encode_chat([{"role": "user", "content": row["prompt"]}])) for row in rows]
