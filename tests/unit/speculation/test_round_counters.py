from __future__ import annotations

import numpy as np

from trtllm_dspark.speculation.round_counters import MAX_RECENT, RoundCounters


def array(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def test_counters_by_hand() -> None:
    counters = RoundCounters(3)
    drafted = np.array([True, True, False, True])
    counters.add(array(3, 1, 0, 2), drafted, array(3, 1, 0, 0), array(2, 0, 0, -1), budget=5)
    counters.add(array(3, 3, 3, 3), drafted, array(3, 3, 0, 3), array(3, 3, 0, 3), budget=64)
    assert counters.by_position() == {
        "drafted": [6, 6, 6],
        "admitted": [6, 5, 4],
        "verified": [5, 4, 4],
        "accepted": [4, 4, 3],
    }
    assert list(counters.recent) == [(5, 4, 9), (9, 9, 9)]


def test_rounds_that_draft_nothing_count_nothing() -> None:
    counters = RoundCounters(3)
    counters.add(array(0, 0), np.zeros(2, np.bool_), array(0, 0), array(0, 0), budget=8)
    assert not counters.recent
    assert counters.by_position()["drafted"] == [0, 0, 0]
    assert RoundCounters(0).by_position() == {"drafted": [], "admitted": [], "verified": [], "accepted": []}


def test_times_add_up_and_recent_rounds_are_bounded() -> None:
    counters = RoundCounters(1)
    counters.add_times(10.0, 12.0)
    counters.add_times(10.0, 9.0)
    assert (counters.predicted_us, counters.measured_us) == (20.0, 21.0)
    for _ in range(MAX_RECENT + 5):
        counters.add(array(1), np.array([True]), array(1), array(1), budget=1)
    assert len(counters.recent) == MAX_RECENT
