"""Corrections of a cost table, by matrices: the oracle of `_core.CostDrift`."""

from __future__ import annotations

import numpy as np

from trtllm_dspark.speculation import drift as rules


class PlainDrift:
    """As `_core.CostDrift`; every observation is kept, and all are fitted anew."""

    def __init__(self) -> None:
        self.base = self.marginal = self.draft = 1.0
        self.rounds_unmeasured = 0
        # Shares of a pass over one token a request: [more, taken]; [1, more, draft, taken]; drafts' [ratio].
        self.passes: list[tuple[float, float]] = []
        self.rounds: list[tuple[float, float, float, float]] = []
        self.drafts: list[float] = []

    def observe_verify(self, first_us: float, more_us: float, measured_us: float) -> float:
        predicted = self.base * first_us + self.marginal * more_us
        taken = believed(measured_us, predicted, first_us + more_us)
        self.passes.append((more_us / first_us, taken / first_us))
        self.rounds_unmeasured = 0 if more_us < rules.FLAT * first_us else self.rounds_unmeasured + 1
        self.correct(*self.fitted())
        return predicted

    def observe_draft(self, draft_us: float, measured_us: float) -> float:
        predicted = self.draft * draft_us
        self.drafts.append(believed(measured_us, predicted, draft_us) / draft_us)
        self.correct(self.base, self.marginal)
        return predicted

    def observe_round(self, first_us: float, more_us: float, draft_us: float, measured_us: float) -> float:
        predicted = self.base * first_us + self.marginal * more_us + self.draft * draft_us
        taken = believed(measured_us, predicted, first_us + more_us + draft_us)
        self.rounds.append((1.0, more_us / first_us, draft_us / first_us, taken / first_us))
        self.rounds_unmeasured += 1
        base = self.base
        if not self.passes:
            sums = faded(self.rounds)
            base = sums[3] / sums[:3].sum()
        self.correct(base, base)
        return predicted

    def observe_untimed(self) -> None:
        self.rounds_unmeasured += 1

    def fitted(self) -> tuple[float, float]:
        """Return base and marginal by least squares, pulled towards what both would be if they were alike."""
        more, taken = np.array(self.passes).T
        design = np.stack([np.ones_like(more), more], axis=1)
        weights = weights_of(len(more))
        normal, right = design.T * weights @ design, design.T * weights @ taken
        alike = right.sum() / normal.sum()
        count = normal[0, 0]
        pull = np.array([rules.PRIOR, rules.PRIOR * normal[1, 1] / count + count * rules.FLAT**2])
        base, marginal = np.linalg.solve(normal + np.diag(pull), right + pull * alike)
        return float(base), float(marginal)

    def correct(self, base: float, marginal: float) -> None:
        draft = float(np.average(self.drafts, weights=weights_of(len(self.drafts)))) if self.drafts else base
        self.base = bounded(base, 1.0, rules.BASE_BOUND)
        if self.rounds:
            count, more, drafts, taken = faded(self.rounds)
            beyond = taken - self.base * count
            marginal = bounded(beyond / (more + drafts), self.base, rules.RATIO_BOUND)
            draft = (beyond - marginal * more) / drafts
        self.marginal = bounded(marginal, self.base, rules.RATIO_BOUND)
        self.draft = bounded(draft, self.base, rules.DRAFT_BOUND)


def weights_of(count: int) -> np.ndarray:
    return rules.MEMORY ** np.arange(count)[::-1]


def faded(observations: list[tuple[float, float, float, float]]) -> np.ndarray:
    return np.asarray(weights_of(len(observations)) @ np.array(observations))


def believed(measured: float, predicted: float, table: float) -> float:
    return min(measured, rules.OUTLIER * max(predicted, table))


def bounded(factor: float, middle: float, bound: float) -> float:
    return float(np.clip(factor, middle / bound, middle * bound))
