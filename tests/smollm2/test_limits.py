"""At the end of the sequence limit, where a whole block no longer fits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.fake_engine import collect_outputs, token_ids
from helpers.smollm2 import smollm2_engine

from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import Engine
from trtllm_dspark.runtime import Request, SamplingParams, Session

MAX_SEQ_LEN = 96


@pytest.fixture(scope="module")
def short_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Return an engine of two slots of 96 tokens and chunks of at most 20."""
    limits = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": 2, "max_num_tokens": 20}
    engine = load_engine(smollm2_engine(request.config.cache.mkdir("trtllm_dspark"), **limits), num_threads=2)
    yield engine
    engine.close()


def generate(engine: Engine, speculation: str, prompts: list[list[int]]) -> dict[str, list[int]]:
    session = Session(engine, None, speculation=speculation)
    for index, prompt in enumerate(prompts):
        session.add(Request(str(index), prompt, SamplingParams(max_tokens=1000)))
    return {name: token_ids(outputs) for name, outputs in collect_outputs(session).items()}


@pytest.mark.parametrize("speculation", ["fixed", "fixed:3", "threshold:0.3"])
def test_generate_to_the_limit_equals_off_for_neighbours_and_followers(
    short_engine: Engine, tokenizer_ids: list[int], speculation: str
) -> None:
    prompts = [tokenizer_ids[:length] for length in (60, 95, 89, 70, 94, 90)]
    expected = generate(short_engine, "off", prompts)
    assert {name: len(tokens) for name, tokens in expected.items()} == {
        str(index): MAX_SEQ_LEN - len(prompt) for index, prompt in enumerate(prompts)
    }
    assert generate(short_engine, speculation, prompts) == expected


@pytest.fixture(scope="module")
def tokenizer_ids(demo_ids: list[list[int]]) -> list[int]:
    """Return the demo's prompts as one long list of ids."""
    return [token for ids in demo_ids for token in ids]
