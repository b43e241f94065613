"""What consumers do with a LoadState."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.load import LoadState, load_metrics, metric_names
from trtllm_dspark.load.sample import Sample

TABLE = np.array([0, 100, 100, 110, 140, 180], np.float32)


def test_stretch_leaves_the_time_of_one_token_and_scales_the_rest() -> None:
    stretched = LoadState(compute_scale=1.5).stretch(TABLE)
    np.testing.assert_allclose(stretched, [0, 100, 100, 115, 160, 220])
    assert stretched.dtype == np.float32


def test_neutral_state_returns_the_table_itself() -> None:
    assert LoadState().stretch(TABLE) is TABLE


@pytest.mark.parametrize("size", [0, 1])
def test_stretch_of_a_table_without_tokens_is_that_table(size: int) -> None:
    assert len(LoadState(compute_scale=2.0).stretch(TABLE[:size])) == size


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 9), (0.5, 4), (0.0, 0)])
def test_verify_budget_rounds_down(scale: float, expected: int) -> None:
    assert LoadState(budget_scale=scale).verify_budget(9) == expected


@pytest.mark.parametrize(("scale", "limit", "expected"), [(1.0, 8, 8), (0.5, 8, 4), (0.5, 1, 1), (0.0, 8, 0)])
def test_max_requests_keeps_one_slot_until_closed(scale: float, limit: int, expected: int) -> None:
    assert LoadState(admission_scale=scale).max_requests(limit) == expected


def test_metrics_have_documented_names_and_leave_out_the_unknown() -> None:
    full = load_metrics(Sample(0.0, sm_clock_mhz=5, xids=(31, 13)), LoadState(available=True, reasons=("xid",)))
    assert set(full) <= set(metric_names())
    assert (full["dspark_load_sm_clock_mhz"], full["dspark_load_xid_last"]) == (5.0, 13.0)
    assert (full["dspark_load_reason_xid"], full["dspark_load_reason_stale"]) == (1.0, 0.0)
    assert "dspark_load_power_watts" not in full
    assert "dspark_load_mig" not in load_metrics(Sample(0.0, failure="no_gpu"), LoadState())
