"""Shares of a limited verify budget follow from who is there, and from nothing a request chooses."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.speculation.shares import INTERACTIVE_WEIGHT, FairShares, shares

ONES = np.ones(4, np.int64)


@pytest.mark.parametrize("budget", range(30))
@pytest.mark.parametrize("interactive", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_shares_use_the_whole_budget_and_no_more(budget: int, interactive: tuple[int, ...]) -> None:
    weights = ONES.copy()
    weights[list(interactive)] = INTERACTIVE_WEIGHT
    for turn in range(4):
        found = shares(weights, budget, 7, turn=turn)
        assert found.sum() == min(budget, 28)
        assert found.min() >= 0
        assert found.max() <= 7
        # Nobody of the heavier class gets less than anybody of the lighter.
        others = np.delete(found, list(interactive))
        if interactive and len(others):
            assert found[list(interactive)].min() >= others.max()


def test_shares_by_hand() -> None:
    # 20 drafts, one weight of 4 and four of 1: 10, of which 7 are kept; the other 13 are split by turns.
    found = shares(np.array([1, 4, 1, 1, 1]), 20, 7, turn=0)
    assert found[1] == 7
    assert sorted(np.delete(found, 1).tolist()) == [3, 3, 3, 4]


def test_equals_get_the_same_over_the_turns() -> None:
    total = sum(shares(ONES, 6, 7, turn=turn) for turn in range(8))
    assert total.tolist() == [12, 12, 12, 12]


def test_budget_for_all_changes_no_cap() -> None:
    caps = np.array([7, 0, 3, 7])
    assert FairShares(7).limit(caps, np.zeros(4, np.bool_), 28) is caps


@pytest.mark.parametrize("mine", [0, 1, 3, 7])
def test_caps_of_one_request_move_no_other(mine: int) -> None:
    def others(own: int) -> list[list[int]]:
        fair = FairShares(7)
        interactive = np.array([False, True, False, False])
        return [fair.limit(np.array([own, 7, 7, 7]), interactive, 13)[1:].tolist() for _ in range(8)]

    assert others(mine) == others(7)


@pytest.mark.parametrize("budget", [0, -5])
def test_no_budget_is_no_draft(budget: int) -> None:
    assert not FairShares(7).limit(np.array([7, 7]), np.array([True, False]), budget).any()


def test_interactive_keeps_more_under_every_budget_that_binds() -> None:
    fair = FairShares(5)
    interactive = np.array([True, False, False, False])
    total = sum(fair.limit(np.full(4, 5), interactive, budget) for budget in range(1, 20))
    assert total[0] > 1.5 * total[1:].max()
