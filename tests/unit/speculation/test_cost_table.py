from __future__ import annotations

import numpy as np
import pytest
from helpers.fake_engine import FakeEngine

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation import CostTable, measure_cost_table

TABLE = CostTable(
    verify_us={(1, 1): 100.0, (1, 2): 120.0, (1, 4): 200.0, (4, 4): 300.0, (4, 8): 500.0},
    draft_us={1: 10.0, 4: 20.0},
)


def test_step_time_between_points_is_interpolated() -> None:
    times = TABLE.step_time_us(1, 4)
    assert times.dtype == np.float32
    assert times[1:].tolist() == [100.0, 120.0, 160.0, 200.0]


def test_step_time_beyond_the_last_point_keeps_its_slope() -> None:
    assert TABLE.step_time_us(1, 6)[5:].tolist() == [240.0, 280.0]


def test_step_time_unmeasured_requests_use_the_next_measured_number() -> None:
    assert TABLE.step_time_us(3, 8)[8] == 500.0
    assert TABLE.step_time_us(9, 8)[8] == 500.0


def test_step_time_noise_is_made_monotone() -> None:
    table = CostTable(verify_us={(1, 1): 100.0, (1, 2): 90.0, (1, 3): 110.0}, draft_us={})
    assert table.step_time_us(1, 3)[1:].tolist() == [100.0, 100.0, 110.0]


def test_step_time_empty_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="no verify times"):
        CostTable({}, {}).step_time_us(1, 4)


def test_draft_time_uses_the_next_measured_number() -> None:
    assert [TABLE.draft_time_us(count) for count in (1, 2, 5)] == [10.0, 20.0, 20.0]


def test_measure_covers_every_width_that_fits() -> None:
    engine = FakeEngine(max_batch_size=3, max_num_tokens=9, gamma=4)
    table = measure_cost_table(engine, draft_len=4)
    assert set(table.verify_us) == {(1, 1), (1, 2), (1, 4), (1, 5), (2, 2), (2, 4), (2, 8), (3, 3), (3, 6)}
    assert set(table.draft_us) == {1, 2, 3}
    assert all(time > 0 for time in (*table.verify_us.values(), *table.draft_us.values()))
