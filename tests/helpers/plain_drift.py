"""Corrections of a cost table from all that was observed at once: the oracle of `_core.CostDrift`."""

from __future__ import annotations

import numpy as np

from trtllm_dspark.speculation import drift as rules

BASE, MARGINAL, DRAFT = range(3)


class PlainDrift:
    """As `_core.CostDrift`; no state is carried from round to round.

    The factors begin at 1 and move by steps whose covariances are kept, one after the other. What they are now is their
    mean given all observations, jointly normal with them: one linear system over the whole history.
    """

    def __init__(self) -> None:
        self.factors, self.rounds_unmeasured = np.ones(3), 0
        self.steps: list[np.ndarray] = []
        # Of an observation: the steps taken before it, what it sees of the factors, its noise, what it found, and how
        # far the factors had been moved into their bounds before it.
        self.seen: list[tuple[int, np.ndarray, float, float, np.ndarray]] = []
        self.moved = np.zeros(3)
        # Of rounds with drafts, as shares of a pass over one token a request: [more]; [more, draft].
        self.passes: list[float] = []
        self.rounds: list[tuple[float, float]] = []
        self.drafts = self.tokens = self.contrasted = False
        # How the last round was timed, and on which side of its prediction it lay if far; the same of changes to it.
        self.kind, self.side = "other", 0.0
        self.changes: dict[str, list[float]] = {"plain": [], "whole": []}
        self.doubt = np.zeros((3, 3))
        self.step(rules.BASE_BOUND * self.factors)

    base = property(lambda self: float(self.factors[BASE]))
    marginal = property(lambda self: float(self.factors[MARGINAL]))
    draft = property(lambda self: float(self.factors[DRAFT]))

    def observe_verify(self, first_us: float, more_us: float, measured_us: float) -> float:
        more = more_us / first_us
        predicted = float(self.factors @ (1.0, more, 0.0))
        self.pass_round()
        if more > 0 and not self.tokens:
            self.tokens = True
            self.step(rules.DOUBT * self.factors * (0.0, 1.0, 0.0))
        told = more
        if more >= rules.FLAT:
            self.passes.append(more)
            told = rules.SHAPE * more + (1.0 - rules.SHAPE) * faded_mean(self.passes)
        self.learn(
            (1.0, told, 0.0),
            believed(measured_us / first_us, predicted, 1.0 + more),
            predicted,
            "plain" if more < rules.FLAT else "other",
        )
        self.rounds_unmeasured = 0 if more < rules.FLAT else self.rounds_unmeasured + 1
        return predicted * first_us

    def observe_draft(self, draft_us: float, measured_us: float) -> float:
        predicted = self.draft
        if not self.drafts:
            self.drafts = True
            self.step(rules.DRAFT_BOUND * self.factors * (0.0, 0.0, 1.0))
        self.learn((0.0, 0.0, 1.0), believed(measured_us / draft_us, predicted, 1.0), predicted)
        return predicted * draft_us

    def observe_round(self, first_us: float, more_us: float, draft_us: float, measured_us: float) -> float:
        more, draft = more_us / first_us, draft_us / first_us
        predicted = float(self.factors @ (1.0, more, draft))
        self.pass_round()
        self.rounds.append((more, draft))
        taken = believed(measured_us / first_us, predicted, 1.0 + more + draft)
        self.learn((1.0, *faded_mean(self.rounds)), taken, predicted, "whole")
        self.rounds_unmeasured += 1
        return predicted * first_us

    def observe_untimed(self) -> None:
        self.rounds_unmeasured += 1

    def pass_round(self) -> None:
        self.step(rules.COMMON_STEP * self.factors)
        fading = [self.ratio_deviation(factor) < rules.DOUBT for factor in (MARGINAL, DRAFT)]
        moves = rules.RATIO_STEP * self.factors * (0.0, *fading)
        for move in [moves] if self.rounds else [moves * (0.0, 1.0, 0.0), moves * (0.0, 0.0, 1.0)]:
            self.step(move)

    def ratio_deviation(self, factor: int) -> float:
        slope = np.zeros(3)
        slope[factor], slope[BASE] = 1.0 / self.factors[factor], -1.0 / self.factors[BASE]
        return float(np.sqrt(slope @ self.doubt @ slope))

    def step(self, move: np.ndarray) -> None:
        """Let the factors move along a direction, by so much as its length."""
        self.steps.append(np.outer(move, move))
        self.doubt = self.doubt + self.steps[-1]

    def learn(self, parts: tuple[float, ...], taken: float, predicted: float, kind: str | None = None) -> None:
        """Learn from a round of a kind, or from a draft."""
        row, off = np.array(parts), taken - predicted
        noise = rules.NOISE * max(predicted, float(self.factors[BASE] * parts[0]))
        if kind is not None:
            self.doubt_factors(row, off, predicted, noise, kind)
        limit = rules.SURPRISE * self.deviation(row, noise)
        found = float(row @ self.factors) + float(np.clip(off, -limit, limit))
        self.seen.append((len(self.steps), row, noise, found, self.moved))
        self.solve()
        self.bound()

    def doubt_factors(self, row: np.ndarray, off: float, predicted: float, noise: float, kind: str) -> None:
        contrast = {kind, self.kind} == {"plain", "whole"}
        self.kind = kind
        if contrast:
            extra = float(self.factors[1:] @ faded_mean(self.rounds))
            # Along this, what the other kind of round is expected to take stays as it is.
            along = np.array([-extra if kind == "plain" else 0.0, *self.factors[1:]])
            if not self.contrasted:
                self.contrasted = True
                self.step(rules.DRAFT_BOUND * along)
        side = float(np.sign(off)) if abs(off) > rules.SURPRISE * self.deviation(row, noise) else 0.0
        if side and side == self.side:
            self.step(off / predicted * self.factors)
        self.side = side
        if contrast:
            # Changes to a kind in a row that lay far off on the same side.
            self.changes[kind] = [*self.changes[kind], side] if side in self.changes[kind] else [side]
            if side and len(self.changes[kind]) >= 3:
                self.step(off / extra * along)

    def deviation(self, row: np.ndarray, noise: float) -> float:
        return float(np.sqrt(row @ self.doubt @ row + noise**2))

    def solve(self) -> None:
        """Set factors and doubt to their mean and covariance, given all that was seen."""
        walked = np.cumsum(self.steps, axis=0)
        times = [seen[0] for seen in self.seen]
        rows = np.array([seen[1] for seen in self.seen])
        early = np.minimum.outer(times, times)
        between = np.einsum("ia,ijab,jb->ij", rows, walked[early - 1], rows)
        between += np.diag([seen[2] ** 2 for seen in self.seen])
        # An observation tells of steps before it only.
        now = np.einsum("iab,ib->ai", walked[np.array(times) - 1], rows)
        off = np.array([seen[3] - seen[1] @ (np.ones(3) + seen[4]) for seen in self.seen])
        weights = np.linalg.solve(between, now.T).T
        self.factors = np.ones(3) + self.moved + weights @ off
        self.doubt = walked[-1] - weights @ now.T

    def bound(self) -> None:
        base, marginal, draft = self.factors
        bounded_base = np.clip(base, 1.0 / rules.BASE_BOUND, rules.BASE_BOUND)
        bounded = np.clip(marginal, bounded_base / rules.RATIO_BOUND, bounded_base * rules.RATIO_BOUND)
        if self.rounds:
            more, drafts = faded_mean(self.rounds)
            draft += (marginal - bounded) * more / drafts
        draft = np.clip(draft, bounded_base / rules.DRAFT_BOUND, bounded_base * rules.DRAFT_BOUND)
        self.moved = self.moved + (np.array([bounded_base, bounded, draft]) - self.factors)
        self.factors = np.array([bounded_base, bounded, draft])


def faded_mean(values: list[float] | list[tuple[float, float]]) -> np.ndarray:
    return np.average(np.array(values), axis=0, weights=rules.MEMORY ** np.arange(len(values))[::-1])


def believed(measured: float, predicted: float, table: float) -> float:
    return min(measured, rules.OUTLIER * max(predicted, table))
