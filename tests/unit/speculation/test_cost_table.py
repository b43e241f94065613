from __future__ import annotations

import numpy as np
import pytest
from helpers.fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.engine.tensorrt._runner import RoundTimer
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation import CostTable, measure_cost_table
from trtllm_dspark.speculation.cost_table import (
    DraftShape,
    VerifyShape,
    check_cost_table,
    is_even,
    is_grown,
    isotonic,
    make_monotone,
)


def flat_rows(times: dict[tuple[int, int], float], depth: int = 0) -> dict[VerifyShape, float]:
    """Return times of (requests, tokens) with rows of equal length."""
    return {VerifyShape(r, t, -(-t // r), depth): us for (r, t), us in times.items()}


TABLE = CostTable(
    verify_us=flat_rows({(1, 1): 100.0, (1, 2): 120.0, (1, 4): 200.0, (4, 4): 300.0, (4, 8): 500.0}),
    draft_us={DraftShape(1, 0): 10.0, DraftShape(4, 0): 20.0},
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
    table = CostTable(verify_us=flat_rows({(1, 1): 100.0, (1, 2): 90.0, (1, 3): 110.0}), draft_us={})
    assert table.step_time_us(1, 3)[1:].tolist() == [100.0, 100.0, 110.0]


def test_step_time_lies_between_even_rows_and_one_grown_row() -> None:
    verify = {
        VerifyShape(2, 2, 1, 0): 100.0,
        VerifyShape(2, 4, 2, 0): 140.0,
        VerifyShape(2, 4, 3, 0): 180.0,
        VerifyShape(2, 6, 3, 0): 200.0,
    }
    assert CostTable(verify, {}).step_time_us(2, 6)[[2, 4, 6]].tolist() == [100.0, 160.0, 200.0]


@pytest.mark.parametrize(("depth", "time"), [(0, 100.0), (10, 100.0), (60, 150.0), (110, 200.0), (210, 300.0)])
def test_step_and_draft_time_follow_the_line_through_the_depths(depth: int, time: float) -> None:
    verify = flat_rows({(1, 1): 100.0}, depth=10) | flat_rows({(1, 1): 200.0}, depth=110)
    table = CostTable(verify, {DraftShape(1, 10): 100.0, DraftShape(1, 110): 200.0})
    assert table.step_time_us(1, 1, depth=depth)[1] == time
    assert table.draft_time_us(1, depth=depth) == time


def test_step_time_empty_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="no verify times"):
        CostTable({}, {}).step_time_us(1, 4)


def test_draft_time_uses_the_next_measured_number() -> None:
    assert [TABLE.draft_time_us(count) for count in (1, 2, 5)] == [10.0, 20.0, 20.0]


def test_draft_time_of_a_table_without_any_is_refused() -> None:
    with pytest.raises(ConfigError, match="no draft times"):
        CostTable(TABLE.verify_us, {}).draft_time_us(1)


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=12))
def test_isotonic_never_falls_keeps_the_mean_and_sorted_values(values: list[float]) -> None:
    fitted = isotonic(values)
    assert all(b >= a * (1 - 1e-12) for a, b in zip(fitted, fitted[1:], strict=False))
    assert np.mean(fitted) == pytest.approx(np.mean(values))
    assert isotonic(sorted(values)) == sorted(values)


def test_make_monotone_pools_neighbours_that_fall() -> None:
    table = CostTable(
        flat_rows({(1, 1): 100.0, (1, 2): 130.0, (1, 3): 110.0}), {DraftShape(1, 0): 30.0, DraftShape(2, 0): 20.0}
    )
    fitted = make_monotone(table)
    assert list(fitted.verify_us.values()) == [100.0, 120.0, 120.0]
    assert list(fitted.draft_us.values()) == [25.0, 25.0]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({(1, 1): 100.0, (1, 2): 101.0}, "flat: 2 tokens took 101 us, 1 took 100 us"),
        ({(1, 1): 100.0, (4, 4): 101.0}, "flat: 4 tokens"),
        ({(1, 1): 100.0, (1, 2): 80.0, (4, 4): 500.0}, "inverted: 2 tokens of 1 requests took 80 us, 1 took 100 us"),
    ],
)
def test_check_flat_or_inverted_table_is_refused(times: dict[tuple[int, int], float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cost_table(CostTable(flat_rows(times), {}))


def test_check_rising_table_passes_in_spite_of_noise() -> None:
    check_cost_table(CostTable(flat_rows({(1, 1): 100.0, (1, 2): 95.0, (1, 4): 93.0, (4, 4): 150.0}), {}))


def test_measure_covers_even_and_grown_shapes_that_fit() -> None:
    engine = FakeEngine(max_batch_size=3, max_num_tokens=9, gamma=4)
    table = measure_cost_table(engine)
    shapes = {(shape.num_requests, shape.num_tokens, shape.longest_row) for shape in table.verify_us}
    assert shapes == {
        *((1, length, length) for length in range(1, 6)),
        *((2, 2 * length, length) for length in range(1, 5)),
        *((2, 1 + length, length) for length in range(2, 6)),
        *((3, 3 * length, length) for length in range(1, 4)),
        *((3, 2 + length, length) for length in range(2, 6)),
    }
    assert {shape.depth for shape in table.verify_us} == {91}
    assert set(table.draft_us) == {DraftShape(count, 91) for count in (1, 2, 3)}
    assert all(time > 0 for time in (*table.verify_us.values(), *table.draft_us.values()))


def test_measure_times_each_shape_five_times_and_reports_progress() -> None:
    engine = FakeEngine(max_batch_size=2, gamma=4)
    steps: list[tuple[int, int]] = []
    table = measure_cost_table(engine, quick=True, progress=lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1][0] == steps[-1][1] == 5 * (len(table.verify_us) + len(table.draft_us))
    rows = [tuple(batch.row_lens.tolist()) for batch in engine.verified]
    assert rows.count((5, 1)) == rows.count((5,)) == rows.count((4, 4)) == 5


def test_measure_runs_at_full_depth_without_holes() -> None:
    """The engine itself checks that target and context hold every token below a pass."""
    engine = FakeEngine(max_batch_size=3, max_num_tokens=7, gamma=4)
    engine.target = [[] for _ in engine.target]
    engine.context = [[] for _ in engine.context]
    measure_cost_table(engine)
    assert all(len(cache) >= 91 for cache in (*engine.target, *engine.context))


def test_measure_every_shape_runs_with_its_tokens_and_longest_row() -> None:
    engine = FakeEngine(max_batch_size=4, max_num_tokens=32, gamma=5, max_seq_len=300)
    table = measure_cost_table(engine)
    ran = {
        VerifyShape(len(b.row_lens), int(b.row_lens.sum()), int(b.row_lens.max()), int(b.write_indices[0]))
        for b in engine.verified
    }
    assert set(table.verify_us) <= ran
    assert {shape.depth for shape in table.verify_us} == {128, 294}
    assert all(is_even(shape) or is_grown(shape, 6) for shape in table.verify_us)


def test_measure_engine_without_drafter_has_verify_times_only() -> None:
    table = measure_cost_table(FakeEngine(has_drafter=False, max_batch_size=2))
    assert table.draft_us == {}
    assert {shape.num_tokens for shape in table.verify_us} == {1, 2}


def test_step_time_of_padded_passes_is_a_staircase() -> None:
    table = CostTable(flat_rows({(1, 1): 100.0, (1, 4): 400.0, (1, 8): 800.0}), {}, token_sizes=(1, 4, 8))
    assert table.step_time_us(1, 8)[1:].tolist() == [100.0, *[400.0] * 3, *[800.0] * 4]
    assert table.step_time_us(1, 6)[1:].tolist() == [100.0, *[400.0] * 3, *[600.0] * 2]


def test_measure_asks_an_engine_that_pads_for_its_sizes() -> None:
    class Padded(FakeEngine):
        token_sizes = (1, 4, 8)

    assert measure_cost_table(Padded(max_batch_size=1), quick=True).token_sizes == (1, 4, 8)
    assert measure_cost_table(FakeEngine(max_batch_size=1), quick=True).token_sizes == ()


class SteadyRounds:
    """Rounds that take as long with drafts as without."""

    def time_round(self, num_requests: int, num_tokens: int, *, drafts: bool, depth: int) -> float:
        return 7.0


def test_drafts_that_a_device_cannot_time_take_a_microsecond() -> None:
    timer = RoundTimer(SteadyRounds())  # type: ignore[arg-type]
    assert timer.draft_us(2, 128) == 1.0
    assert timer.verify_us(2, 4, 128) == 7.0
