"""Summaries of evaluation runs against counts by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from trtllm_dspark.evaluation import EvaluationRun, ThresholdPoint, summarise
from trtllm_dspark.evaluation.results import accepted_len_interval, conditional_acceptance, merge, threshold_sweep
from trtllm_dspark.speculation import AcceptanceStatistics, Calibration
from trtllm_dspark.speculation.calibration import Observations

GAMMA = 3


def logit(*values: float) -> list[float]:
    return [math.log(value / (1 - value)) for value in values]


def statistics(*accepted: int) -> AcceptanceStatistics:
    """Return the counters of whole blocks with so many accepted drafts each."""
    result = AcceptanceStatistics(GAMMA)
    for count in accepted:
        result.record(drafted=GAMMA, verified=GAMMA, accepted=count, emitted=count + 1)
    return result


BLOCKS = Observations(
    np.array([logit(0.9, 0.9, 0.9), logit(0.9, 0.5, 0.9), logit(0.4, 0.9, 0.9), logit(0.8, 0.8, 0.2)]),
    np.array([3, 1, 0, 2]),
)
RUN = EvaluationRun([statistics(3, 1), statistics(0, 2)], BLOCKS)


def test_conditional_acceptance_counts_blocks_that_got_there() -> None:
    # Reached: 4, 3, 2 blocks; accepted: 3, 2, 1.
    assert conditional_acceptance(RUN, GAMMA) == (3 / 4, 2 / 3, 1 / 2)
    assert conditional_acceptance(EvaluationRun(RUN.acceptance), GAMMA) == (3 / 4, 2 / 3, 1 / 2)


def test_conditional_acceptance_of_positions_never_reached_is_none() -> None:
    assert conditional_acceptance(EvaluationRun([statistics(0, 0)]), GAMMA) == (0.0, None, None)
    assert conditional_acceptance(EvaluationRun(), GAMMA) == (None, None, None)


def test_threshold_sweep_by_hand() -> None:
    none, middle, all_cut = threshold_sweep(Calibration.identity(GAMMA), BLOCKS, (0.0, 0.6, 0.95))
    assert none == ThresholdPoint(0.0, verified=3.0, accepted_len=1 + 6 / 4, wasted=pytest.approx(0.5))
    # Survivals .9 .81 .729 | .9 .45 | .4 | .8 .64 .128 verify 3, 1, 0, 2 drafts: just those that were accepted.
    assert middle == ThresholdPoint(0.6, verified=6 / 4, accepted_len=1 + 6 / 4, wasted=0.0)
    assert all_cut == ThresholdPoint(0.95, verified=0.0, accepted_len=1.0, wasted=None)


def test_threshold_sweep_reads_calibrated_survivals() -> None:
    gloomy = Calibration((1.0,) * GAMMA, (-30.0,) * GAMMA)
    assert threshold_sweep(gloomy, BLOCKS, (0.1,))[0].verified == 0


def test_interval_covers_the_mean_and_is_repeatable() -> None:
    entries = [statistics(*row) for row in ((3, 3, 3), (0, 0), (1, 2, 1, 0), (2,), (3, 0))]
    low, high = accepted_len_interval(entries) or (0.0, 0.0)
    mean = sum(entry.emitted for entry in entries) / sum(entry.rounds for entry in entries)
    assert low < mean < high
    assert accepted_len_interval(entries) == (low, high)
    assert accepted_len_interval(entries[:1]) is None


def test_summary_with_and_without_calibration_and_confidence() -> None:
    plain = summarise("x", 0.0, RUN, gamma=GAMMA, calibration=None)
    assert (plain.prompts, plain.rounds, plain.accepted_len) == (2, 4, 10 / 4)
    assert plain.quality is not None
    assert plain.calibrated is None
    calibrated = summarise("x", 0.0, RUN, gamma=GAMMA, calibration=Calibration((1.0,) * 3, (-9.0,) * 3))
    assert calibrated.calibrated is not None
    assert calibrated.calibrated.mean_ece > calibrated.quality.mean_ece  # type: ignore[union-attr]
    blind = summarise("x", 0.0, EvaluationRun(RUN.acceptance), gamma=GAMMA, calibration=None)
    assert (blind.quality, blind.sweep) == (None, ())
    for result in (plain, calibrated, blind):
        json.dumps(result.as_json(), allow_nan=False)


def test_json_has_no_nan_where_one_class_has_no_auc() -> None:
    blocks = Observations(np.zeros((2, GAMMA)), np.array([3, 3]))
    result = summarise("x", 0.0, EvaluationRun([statistics(3, 3)], blocks), gamma=GAMMA, calibration=None)
    assert result.as_json()["quality"]["auc"] == [None, None, None]


def test_merge_joins_requests_and_blocks() -> None:
    both = merge([RUN, RUN])
    assert len(both.acceptance) == 4
    assert both.blocks is not None
    assert len(both.blocks) == 8
    assert conditional_acceptance(both, GAMMA) == conditional_acceptance(RUN, GAMMA)
