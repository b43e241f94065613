"""A session applies a calibration to the confidences it schedules by, and tells a recorder what came of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from helpers.fake_engine import DOUBTFUL, SURE, FakeEngine, collect_outputs, greedy, token_ids

from trtllm_dspark.cli import serve
from trtllm_dspark.errors import UsageError
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.speculation import Calibration, ConfidenceRecorder

PROMPT = [3, 1, 4, 1, 5]


def generate(session: Session, max_tokens: int = 20) -> list[int]:
    session.add(Request("a", PROMPT, SamplingParams(max_tokens=max_tokens)))
    return token_ids(collect_outputs(session)["a"])


def longest_rows(engine: FakeEngine) -> set[int]:
    return {int(batch.row_lens.max()) for batch in engine.verified[1:]}


@pytest.mark.parametrize(("bias", "longest"), [(0.0, {2, 3, 4, 5}), (-9.0, {1}), (9.0, {5})])
def test_calibration_moves_what_a_threshold_verifies(bias: float, longest: set[int]) -> None:
    engine = FakeEngine()
    calibration = Calibration((1.0,) * 4, (bias,) * 4)
    session = Session(engine, None, speculation="threshold:0.3", calibration=calibration)
    assert generate(session) == greedy(PROMPT, 20)
    # The last rounds are cut by what is left to emit.
    assert longest_rows(engine) & longest
    assert max(longest_rows(engine)) <= max(longest)


def test_calibration_positions_beyond_the_draft_are_not_needed() -> None:
    session = Session(FakeEngine(), None, speculation="threshold:0.3", calibration=Calibration((2.0,) * 4, (0.5,) * 4))
    assert generate(session.sibling(speculation="fixed:2")) == greedy(PROMPT, 20)


def test_sibling_keeps_the_calibration() -> None:
    engine = FakeEngine()
    session = Session(engine, None, speculation="off", calibration=Calibration((1.0,) * 4, (-9.0,) * 4))
    generate(session.sibling(speculation="threshold:0.3"))
    assert longest_rows(engine) == {1}


def test_recorder_gets_raw_logits_and_what_was_accepted() -> None:
    recorder = ConfidenceRecorder(4)
    session = Session(FakeEngine(), None, speculation="fixed", recorder=recorder)
    generate(session, 40)
    found = recorder.observations()
    assert len(found) > 5
    assert set(np.unique(found.logits.round(3))) == {DOUBTFUL, SURE}
    # The drafter of this engine knows when it is wrong: the first doubtful draft is the first that fails.
    doubtful = found.logits < 0
    first = np.where(doubtful.any(axis=1), doubtful.argmax(axis=1), 4)
    assert found.accepted.tolist() == first.tolist()


def test_recorder_of_requests_that_do_not_draft_stays_empty() -> None:
    recorder = ConfidenceRecorder(4)
    session = Session(FakeEngine(), None, speculation="fixed", recorder=recorder)
    session.add(Request("a", PROMPT, SamplingParams(max_tokens=9, speculation=False)))
    collect_outputs(session)
    assert len(recorder.observations()) == 0


def test_recorder_of_failed_requests_gets_nothing() -> None:
    recorder = ConfidenceRecorder(4)
    session = Session(FakeEngine(nan_prefix=PROMPT[0]), None, speculation="fixed", recorder=recorder)
    session.add(Request("a", PROMPT, SamplingParams(max_tokens=9)))
    collect_outputs(session)
    assert len(recorder.observations()) == 0


@pytest.mark.parametrize("speculation", ["off", "fixed:2"])
def test_serve_refuses_to_learn_a_calibration_nobody_reads(speculation: str, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(
        ["--engine_dir", str(tmp_path), "--speculation", speculation, "--calibration", "online"],
    )
    with pytest.raises(UsageError, match="needs a mode that reads confidences"):
        serve.run(args)
