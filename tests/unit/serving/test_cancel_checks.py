"""Few questions while a request waits, none later than promised, and one soon after every item."""

from __future__ import annotations

from itertools import pairwise

import pytest

from trtllm_dspark.serving.cancel_checks import LONGEST_S, is_due

PERIOD_S = 0.02


def asked(seconds: float, gap: float) -> list[float]:
    """Return when a request is asked about that hears something every `gap` seconds and is polled every period."""
    times, asked_at = [], 0.0
    for tick in range(1, round(seconds / PERIOD_S) + 1):
        now = tick * PERIOD_S
        if is_due(now, heard_at=now // gap * gap, asked_at=asked_at):
            times.append(now)
            asked_at = now
    return times


def test_cancel_checks_of_a_waiting_request_become_rare_but_stay_regular() -> None:
    times = asked(10.0, gap=1e9)
    assert len(times) <= 10.0 / LONGEST_S + 3
    assert times[0] == pytest.approx(PERIOD_S)
    assert max(later - before for before, later in pairwise(times)) < LONGEST_S + PERIOD_S + 1e-9


def test_cancel_checks_of_quick_rounds_come_every_period() -> None:
    assert len(asked(10.0, gap=0.005)) == round(10.0 / PERIOD_S)


@pytest.mark.parametrize("gap", [0.1, 0.25, 1.0])
def test_cancel_checks_of_slow_rounds_come_soon_after_every_item(gap: float) -> None:
    times = asked(10.0, gap)
    assert len(times) < 0.7 * 10.0 / PERIOD_S
    for round_index in range(1, int(10.0 / gap) - 1):
        item = round_index * gap
        assert any(item <= moment <= item + 2 * PERIOD_S for moment in times)
