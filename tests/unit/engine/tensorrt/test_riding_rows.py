"""Rows that ride along cost a token each and emit none: a schedule by throughput must not count them as requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.plugin_engine import open_plugins, write_plugin_pair
from helpers.recording_device import RecordingDevice
from helpers.tiny_tensorrt import Written, open_on, random_pair, random_weights
from helpers.trt_rounds import fields, prompts, run, sampling

from trtllm_dspark import _core
from trtllm_dspark.engine.rounds import DecodeRows, DeviceSchedule, PromptRows, RoundBatch, RoundResult
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.graph import RoundOptions

GAMMA, BUCKET, FIXED_US = 5, 6, 40.0
Round = Callable[[np.ndarray], RoundResult]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The random pair with eight slots: five requests run in a bucket of six."""
    limits = BuildLimits(max_batch_size=8, max_seq_len=96, max_num_tokens=64, max_draft_len=GAMMA)
    return random_pair(tmp_path_factory.mktemp("eight"), limits=limits)


@pytest.fixture(params=["core", "sources", "plugins"])
def opened_pair(request: pytest.FixtureRequest, pair: Written, tmp_path: Path) -> Callable[[], Any]:
    if request.param == "plugins":
        options = RoundOptions("rejection", "early_stop")
        written = write_plugin_pair(tmp_path, pair, random_weights(), options)
        return lambda: open_plugins(RecordingDevice(heads=pair.heads), written)
    kernels = request.getfixturevalue("kernels") if request.param == "sources" else None
    heads = pair.heads if kernels is None else None
    return lambda: open_on(RecordingDevice(kernels, heads=heads), pair)


def first_round(engine: Any, max_new_tokens: list[int], step_time_us: np.ndarray) -> RoundResult:
    """Read the prompts, then decode once with schedule early_stop."""
    count = len(max_new_tokens)
    chunk = prompts(count).prompts
    assert chunk is not None
    chunk = PromptRows(**{**fields(chunk), "max_new_tokens": np.array(max_new_tokens)})
    schedule = DeviceSchedule(
        "early_stop", GAMMA, 0.0, 0, count * GAMMA, step_time_us=step_time_us, fixed_time_us=FIXED_US
    )
    decode = DecodeRows(np.full(count, GAMMA), sampling(count), schedule)
    batches = [RoundBatch(None, chunk, "rejection"), RoundBatch(decode, None, "rejection")]
    key = engine._rounds.key(decode, 1)
    assert key.num_requests == BUCKET
    result: RoundResult = run(engine, batches)[1]
    engine.close()
    return result


def costs(slope: float) -> np.ndarray:
    """Return passes that take 60 us with the bucket's rows alone and `slope` us more a draft."""
    return (60.0 + slope * (np.arange(8 * (GAMMA + 1) + 1) - BUCKET)).astype(np.float32)


@pytest.mark.parametrize(
    "max_new_tokens",
    [[30] * 5, [30, 30, 1, 30, 30], [1, 30, 30, 30, 30, 30]],
    ids=["padding", "padding_and_an_ended_request", "an_ended_request"],
)
def test_early_stop_counts_the_requests_that_emit(opened_pair: Callable[[], Any], max_new_tokens: list[int]) -> None:
    # The first token ends such a request; the host does not know yet when it submits the round.
    live = np.array(max_new_tokens) > 1
    confidence = first_round(opened_pair(), max_new_tokens, costs(1.0)).confidence
    assert confidence is not None
    # A draft pays where its survival is above requests * slope / time: between what `live` and BUCKET requests ask.
    survival = float(confidence[live, 0].max())
    slope = (60.0 + FIXED_US) * survival / ((live.sum() + BUCKET) / 2)
    result = first_round(opened_pair(), max_new_tokens, costs(slope))
    np.testing.assert_array_equal(result.confidence, confidence)

    def expected(rows: np.ndarray, emitting: int) -> np.ndarray:
        wanted = np.zeros((emitting, GAMMA), np.float32)
        wanted[: len(rows)] = rows
        schedule = _core.schedule_prefixes(
            "early_stop", num_requests=emitting, max_draft_len=GAMMA, confidence=wanted,
            step_time_us=costs(slope), extra_tokens=BUCKET - emitting, fixed_time_us=FIXED_US,
        )  # fmt: skip
        assert not schedule.warnings
        return schedule.verify_len[: len(rows)]

    wanted = expected(confidence[live], int(live.sum()))
    assert wanted.sum() > expected(confidence[live], BUCKET).sum() == 0, "the case is borderline"
    assert result.verify_len is not None
    np.testing.assert_array_equal(result.verify_len[live], wanted)
    assert not result.verify_len[~live].any()
