"""Which seeds become which keys; why it matters is shown in tests/statistical/test_shared_seeds.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers.fake_engine import FakeEngine, collect_outputs, token_ids

from trtllm_dspark.runtime.request import Request
from trtllm_dspark.runtime.sampling_params import SamplingParams
from trtllm_dspark.runtime.session import Session
from trtllm_dspark.runtime.stream_keys import StreamKeys
from trtllm_dspark.speculation import Calibration, SpeculationConfig
from trtllm_dspark.speculation.controller import LoadLimits
from trtllm_dspark.speculation.online_calibration import OnlineCalibration


class NoLimits:
    """A load source that limits nothing, yet."""

    def limits(self) -> LoadLimits:
        return LoadLimits()


def keys(speculation: str, acceptance: str = "rejection", *, max_num_tokens: int = 256) -> StreamKeys:
    limits = dataclasses.replace(FakeEngine().limits, max_batch_size=4, max_num_tokens=max_num_tokens)
    return StreamKeys(SpeculationConfig.parse(speculation), acceptance, limits, draft_len=7)


@pytest.mark.parametrize("speculation", ["off", "fixed", "threshold:0.3"])
def test_key_schedule_that_looks_at_one_request_is_the_seed(speculation: str) -> None:
    stream = keys(speculation)
    assert [stream.key(5), stream.key(5), stream.key(0)] == [5, 5, 0]


@pytest.mark.parametrize("speculation", ["early_stop", "stale_topk", "stale_topk:4"])
def test_key_schedule_that_compares_requests_never_repeats(speculation: str) -> None:
    stream = keys(speculation)
    drawn = [stream.key(seed) for seed in (5, 5, 5, 0, 0, 2**64 - 1, 2**64 - 1)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= key < 2**64 for key in drawn)


def test_key_same_requests_in_the_same_order_get_the_same_keys() -> None:
    first, second = keys("early_stop"), keys("early_stop")
    assert [first.key(5) for _ in range(3)] == [second.key(5) for _ in range(3)]


@pytest.mark.parametrize("speculation", ["early_stop", "stale_topk", "threshold:0.3"])
def test_key_coupled_output_needs_the_seed_itself(speculation: str) -> None:
    stream = keys(speculation, "coupled", max_num_tokens=16)
    assert [stream.key(5), stream.key(5)] == [5, 5]


@pytest.mark.parametrize("speculation", ["fixed", "threshold"])
def test_key_under_a_budget_that_can_cut_drafts_never_repeats(speculation: str) -> None:
    # (60 - 4) // 2 = 28 = 4 requests x 7 drafts still fit; one token less does not.
    assert keys(speculation, max_num_tokens=60).key(5) == 5
    stream = keys(speculation, max_num_tokens=59)
    assert stream.key(5) != stream.key(5)


@pytest.mark.parametrize(("acceptance", "distinct"), [("rejection", True), ("coupled", False)])
def test_key_where_past_rounds_of_others_decide_never_repeats(acceptance: str, distinct: bool) -> None:
    limits = dataclasses.replace(FakeEngine().limits, max_batch_size=4, max_num_tokens=256)
    stream = StreamKeys(SpeculationConfig("threshold"), acceptance, limits, draft_len=7, learns=True)
    assert (stream.key(5) != stream.key(5)) is distinct


@pytest.mark.parametrize(
    ("arguments", "distinct"),
    [
        ({}, False),
        ({"calibration": Calibration.identity(4)}, False),
        ({"calibration": OnlineCalibration(Calibration.identity(4))}, True),
        ({"load": NoLimits()}, True),
    ],
)
def test_session_that_learns_from_others_tells_equal_seeds_apart(arguments: dict[str, Any], distinct: bool) -> None:
    session = Session(FakeEngine(logit=1.0, max_num_tokens=64), None, speculation="threshold", **arguments)
    for name in "ab":
        session.add(Request(name, [3, 1, 4], SamplingParams(temperature=1.0, seed=7, max_tokens=30)))
    outputs = collect_outputs(session)
    assert (token_ids(outputs["a"]) != token_ids(outputs["b"])) is distinct


def test_key_no_seed_differs_every_time() -> None:
    stream = keys("off")
    assert stream.key(None) != stream.key(None)


def test_session_equal_seeds_of_a_batch_draw_different_tokens_where_requests_are_compared() -> None:
    def texts(acceptance: str) -> list[list[int]]:
        session = Session(FakeEngine(logit=3.0), None, speculation="stale_topk:4", acceptance=acceptance)  # type: ignore[arg-type]
        for name in ("a", "b"):
            session.add(Request(name, [1, 2, 3], SamplingParams(temperature=1.0, seed=9, max_tokens=12)))
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        while session.has_unfinished():
            for output in session.step():
                tokens[output.request_id] += output.new_token_ids
        return list(tokens.values())

    first, second = texts("rejection")
    assert first != second
    first, second = texts("coupled")
    assert first == second


def test_key_where_nothing_is_verified_is_the_seed() -> None:
    limits = dataclasses.replace(FakeEngine().limits, max_batch_size=4, max_num_tokens=16)
    stream = StreamKeys(SpeculationConfig("adaptive"), "rejection", limits, draft_len=0, learns=True)
    assert [stream.key(5), stream.key(5)] == [5, 5]
