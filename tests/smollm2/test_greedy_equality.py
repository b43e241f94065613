"""Greedy output never depends on speculation or on what else is in the batch, token for token."""

from __future__ import annotations

import pytest
from helpers.adaptive_loop import MovingCalibration, MovingLoad, toy_table
from helpers.fake_engine import collect_outputs, token_ids

from trtllm_dspark.engine.base import Engine
from trtllm_dspark.runtime import Request, SamplingParams, Session

MAX_TOKENS = 128
NUM_PROMPTS = 40
MODES = ("fixed", "threshold:0.3")


def generate(engine: Engine, speculation: str, prompts: list[list[int]], *, alone: bool) -> list[list[int]]:
    """Return each prompt's greedy tokens; not alone = up to eight at once, every third slot a sampled stranger."""
    session = Session(engine, None, speculation=speculation, eos_token_ids=[2])
    outputs = {}
    for index, prompt in enumerate(prompts):
        session.add(Request(str(index), prompt, SamplingParams(max_tokens=MAX_TOKENS)))
        if alone:
            outputs |= collect_outputs(session)
        elif index % 3 == 0:
            noise = SamplingParams(
                temperature=1.0, top_p=0.9, seed=index, max_tokens=20 + index, speculation=index % 2 == 0
            )
            session.add(Request(f"noise{index}", prompt[: 5 + index], noise))
    outputs |= collect_outputs(session)
    return [token_ids(outputs[str(index)]) for index in range(len(prompts))]


@pytest.fixture(scope="module")
def expected(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return generate(engine, "off", prompts, alone=True)


@pytest.fixture(scope="module", params=["demo", "eval"])
def prompts(request: pytest.FixtureRequest, demo_ids: list[list[int]]) -> list[list[int]]:
    """Return the demo's prompts, and enough evaluation prompts to make forty in all."""
    if request.param == "demo":
        return demo_ids
    rows = request.getfixturevalue("eval_ids")
    # The file is sorted by domain: take from all of them.
    step = len(rows) / (NUM_PROMPTS - len(demo_ids))
    return [rows[int(index * step)][1] for index in range(NUM_PROMPTS - len(demo_ids))]


@pytest.mark.parametrize("mode", MODES)
def test_generate_alone_equals_off(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]], mode: str
) -> None:
    assert generate(engine, mode, prompts, alone=True) == expected


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_generate_in_mixed_batches_equals_off_alone(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]], mode: str
) -> None:
    assert generate(engine, mode, prompts, alone=False) == expected


@pytest.mark.parametrize("draft_len", range(1, 7))
def test_generate_every_verify_width_equals_off(engine: Engine, demo_ids: list[list[int]], draft_len: int) -> None:
    prompts = demo_ids[::5]
    assert generate(engine, f"fixed:{draft_len}", prompts, alone=True) == generate(engine, "off", prompts, alone=True)


def test_generate_adaptive_under_moving_load_and_calibration_equals_off(
    engine: Engine, demo_ids: list[list[int]]
) -> None:
    """Lengths, plain rounds and the context that catches up after them change every round."""
    prompts = demo_ids[::4]
    session = Session(
        engine,
        None,
        speculation="adaptive",
        eos_token_ids=[2],
        cost_table=toy_table(engine.limits.max_batch_size, engine.limits.max_draft_len),
        calibration=MovingCalibration(),
        load=MovingLoad(),
    )
    for index, prompt in enumerate(prompts):
        session.add(Request(str(index), prompt, SamplingParams(max_tokens=MAX_TOKENS)))
    outputs = collect_outputs(session)
    expected = generate(engine, "off", prompts, alone=False)
    assert [token_ids(outputs[str(index)]) for index in range(len(prompts))] == expected
    assert session.stats.acceptance.accepted > 20
    assert session.stats.plans["load"] >= 10
