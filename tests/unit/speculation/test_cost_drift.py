"""Corrections of a cost table equal those from all that was observed, and what all costs share moves no ratio."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers.plain_drift import PlainDrift
from helpers.virtual_rounds import table_of

from trtllm_dspark.errors import NativeError
from trtllm_dspark.speculation.drift import RoundCosts

FACTORS = ("base", "marginal", "draft")


def costs() -> RoundCosts:
    return RoundCosts(table_of(lambda r, t: 1000.0 + 50.0 * (t - r)), max_draft_len=7)


@pytest.mark.parametrize("timed", ["parts", "rounds", "mixed"])
@pytest.mark.parametrize("seed", range(2))
def test_corrections_equal_those_of_a_fit_to_all_observations(timed: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    core, plain = costs()._drift, PlainDrift()
    seen = []
    for number in range(120):
        first, draft = rng.uniform(500.0, 900.0, 2).tolist()
        more = float(rng.choice([0.0, rng.uniform(0.0, 800.0)]))
        # Sometimes a round is interrupted, and for a while the machine is another one.
        slow = rng.choice([1.0, 20.0], p=[0.95, 0.05]) * (0.2 if 40 <= number < 80 else 1.7)
        if timed == "parts" or (timed == "mixed" and number % 3):
            pairs = [(one.observe_verify(first, more, slow * (first + 3 * more))) for one in (core, plain)]
            seen.append(pairs)
            pairs = [one.observe_draft(draft, slow * 5 * draft) for one in (core, plain)]
        else:
            pairs = [one.observe_round(first, more, draft, slow * (first + more + 4 * draft)) for one in (core, plain)]
        seen.append(pairs)
        if rng.random() < 0.05:
            core.observe_untimed()
            plain.observe_untimed()
        assert core.rounds_unmeasured == plain.rounds_unmeasured
        found = [getattr(core, name) for name in FACTORS]
        assert found == pytest.approx([getattr(plain, name) for name in FACTORS], rel=1e-5)
    np.testing.assert_allclose(*np.array(seen).T, rtol=1e-5)


FIRST, MORE, DRAFT = 1000.0, 50.0, 100.0
"""Microseconds by the table, so that drafting is a small part of a round."""


class Rounds:
    """Rounds of a machine that is as the table says, but for factors; one in 65 drafts nothing, as while speculating.

    Args:
        whole: rounds are timed whole.
        noise: standard deviation of the logarithm of a time.
    """

    def __init__(self, *, whole: bool, noise: float = 0.0, seed: int = 0) -> None:
        self.drift, self.rng = costs()._drift, np.random.default_rng(seed)
        self.whole, self.noise, self.number = whole, noise, 0

    def ratios(self) -> tuple[float, float]:
        return self.drift.draft / self.drift.base, self.drift.marginal / self.drift.base

    def run(self, rounds: int, *, clock: float = 1.0, drafts: float = 1.0, plain: bool = False) -> np.ndarray:
        """Return [rounds, 2] of drafting and marginal cost over the base."""
        found = []
        for _ in range(rounds):
            self.number += 1
            if plain or self.number % 65 == 9:
                self.drift.observe_verify(FIRST, 0.0, clock * self.noisy(FIRST))
            elif self.whole:
                self.drift.observe_round(FIRST, MORE, DRAFT, clock * self.noisy(FIRST + MORE + drafts * DRAFT))
            else:
                self.drift.observe_verify(FIRST, MORE, clock * self.noisy(FIRST + MORE))
                self.drift.observe_draft(DRAFT, clock * self.noisy(drafts * DRAFT))
            found.append(self.ratios())
        return np.array(found)

    def noisy(self, micros: float) -> float:
        return micros * float(np.exp(self.noise * self.rng.normal()))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("clock", [0.5, 0.8, 1.2, 2.0])
def test_clock_that_changes_while_speculating_changes_no_ratio(clock: float, whole: bool) -> None:
    one = Rounds(whole=whole)
    one.run(1000)
    found = one.run(1000, clock=clock)
    assert np.abs(np.log(found)).max() < np.log(1.1)
    assert one.drift.base == pytest.approx(clock, rel=0.01)


@pytest.mark.parametrize("whole", [False, True])
def test_clock_that_changes_while_nothing_is_drafted_changes_no_ratio(whole: bool) -> None:
    one = Rounds(whole=whole)
    one.run(1000, clock=2.0)
    found = np.concatenate([one.run(300, clock=1.0, plain=True), one.run(300, clock=1.0)])
    assert np.abs(np.log(found)).max() < np.log(1.2)
    assert one.drift.base == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_ratios_stay_while_the_machine_is_restless(seed: int, whole: bool) -> None:
    """Times scatter by 3% and the machine is half as fast again for twenty rounds now and then."""
    one = Rounds(whole=whole, noise=0.03, seed=seed)
    one.run(1000)
    found = []
    for _ in range(100):
        found += [one.run(int(one.rng.integers(1, 40)), clock=clock) for clock in (1.0, 1.5)]
    drafting = np.log(np.concatenate(found)[:, 0])
    assert np.abs(drafting).max() < np.log(1.4)
    assert np.sqrt((drafting**2).mean()) < 0.15


@pytest.mark.parametrize(("whole", "rounds"), [(False, 300), (True, 1000)])
def test_drafts_that_cost_more_from_some_time_on_are_noticed(whole: bool, rounds: int) -> None:
    one = Rounds(whole=whole)
    one.run(1000)
    one.run(rounds, drafts=5.0)
    cost = one.drift.marginal * MORE + one.drift.draft * DRAFT
    # Ratios move slowly on purpose: within a fifth so soon, where the table's own drafts were five times too cheap.
    assert cost / one.drift.base == pytest.approx(MORE + 5.0 * DRAFT, rel=0.2)


def test_passes_are_predicted_by_the_corrected_table() -> None:
    one = costs()
    for tokens in (4, 8, 20) * 40:
        one.observe_verify(4, tokens, 128, 2000.0 + 200.0 * (tokens - 4))
        one.observe_draft(4, 128, 500.0)
    assert one.correction == pytest.approx((2.0, 4.0, 500.0 / one.table.draft_time_us(4, depth=128)), rel=0.02)
    curve = one.verify_us(4, 128, cost_scale=2.0)
    assert curve[[4, 8]].tolist() == pytest.approx([2000.0, 2000.0 + 2 * 800.0], rel=0.02)
    assert one.plain_us(4, 128) == pytest.approx(2000.0, rel=0.02)
    assert one.draft_us(4, 128) == pytest.approx(500.0, rel=1e-3)
    assert one.observe_verify(4, 8, 128, 2800.0, cost_scale=2.0) == pytest.approx(float(curve[8]))


def test_curves_are_kept_by_rounded_depth() -> None:
    one = costs()
    assert one.table_us(4, 130) is one.table_us(4, 128)
    assert one.table_us(4, 128)[0] == one.table_us(4, 128)[4]
    assert one.table_us(8, 128) is not one.table_us(4, 128)


def test_a_copy_goes_its_own_way() -> None:
    one = costs()._drift
    two = copy.deepcopy(one)
    two.observe_verify(100.0, 10.0, 300.0)
    assert one.base == 1.0
    assert two.base > 2.0


def test_drift_refuses_what_it_cannot_divide_by() -> None:
    one = costs()._drift
    with pytest.raises(NativeError, match="first_us is 0"):
        one.observe_verify(0.0, 1.0, 1.0)
    with pytest.raises(NativeError, match="draft_us is nan"):
        one.observe_draft(float("nan"), 1.0)
    shares = dict.fromkeys(("noise", "common", "ratio", "doubt", "shape", "flat"), 0.1)
    bounds = dict.fromkeys(("surprise", "outlier", "base_bound", "marginal_bound", "draft_bound"), 2.0)
    with pytest.raises(NativeError, match="memory is 2"):
        type(one)(memory=2.0, **shares, **bounds)


def test_what_the_host_does_beside_rounds_with_drafts_is_part_of_a_draft() -> None:
    one = costs()
    alone = one.draft_us(4, 128)
    for _ in range(7):
        one.observe_beside(True, 900.0)
        one.observe_beside(False, 300.0)
    assert one.draft_us(4, 128) == alone, "few rounds tell little"
    for number in range(200):
        # One that was interrupted counts as three usual ones.
        one.observe_beside(True, 900.0 if number % 50 else 1e6)
        one.observe_beside(False, 300.0)
    assert one.draft_us(4, 128) == pytest.approx(alone + 600.0, abs=60.0)
    for _ in range(400):
        one.observe_beside(False, 5000.0)
    assert one.draft_us(4, 128) == alone, "drafting is never taken to save work"
