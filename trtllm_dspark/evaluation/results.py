"""Summarise evaluation runs: accepted length, conditional acceptance, confidence quality, threshold sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.evaluation.measure import EvaluationRun
from trtllm_dspark.speculation import AcceptanceStatistics, Calibration
from trtllm_dspark.speculation.calibration import Observations, Quality, evaluate

RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class ThresholdPoint:
    """What verifying drafts only while their survival is at least `threshold` would have done to the same blocks.

    Attributes:
        threshold: least survival of a verified draft.
        verified: drafts verified a block, on average.
        accepted_len: tokens emitted a block, bonus included, on average.
        wasted: share of the verified drafts that were rejected; None where none was verified.
    """

    threshold: float
    verified: float
    accepted_len: float
    wasted: float | None


@dataclass(frozen=True, slots=True)
class DomainResult:
    """What the drafter did on one domain at one temperature.

    Attributes:
        domain: label of the prompts, `all` over every domain.
        temperature: sampling temperature; 0 is greedy.
        prompts: requests that were run.
        rounds: verify rounds.
        accepted_len: tokens emitted per verify round, bonus included (the paper's tau); None without a round.
        accepted_len_interval: 95 % bootstrap interval over prompts.
        conditional_acceptance: [gamma] P(draft k accepted | drafts before k accepted); None where none reached k.
        quality: calibration error and AUC of the confidence head as it is; None without a head.
        calibrated: the same with the engine's calibration; None without one.
        sweep: threshold sweep over the survivals that a session would use.
    """

    domain: str
    temperature: float
    prompts: int
    rounds: int
    accepted_len: float | None
    accepted_len_interval: tuple[float, float] | None
    conditional_acceptance: tuple[float | None, ...]
    quality: Quality | None
    calibrated: Quality | None
    sweep: tuple[ThresholdPoint, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON types (docs/file_formats.md); values that do not exist are null."""
        plain = asdict(self)
        for name in ("quality", "calibrated"):
            quality: Quality | None = getattr(self, name)
            plain[name] = None if quality is None else _quality_json(quality)
        return plain


def summarise(
    domain: str, temperature: float, run: EvaluationRun, *, gamma: int, calibration: Calibration | None
) -> DomainResult:
    """Return the summary of a run.

    Args:
        domain: label.
        temperature: sampling temperature of the run.
        run: what was seen.
        gamma: drafts of a block.
        calibration: the engine's, or None.
    """
    blocks = run.blocks if run.blocks is not None and len(run.blocks) else None
    rounds = sum(entry.rounds for entry in run.acceptance)
    used = Calibration.identity(gamma) if calibration is None else calibration
    return DomainResult(
        domain=domain,
        temperature=temperature,
        prompts=len(run.acceptance),
        rounds=rounds,
        accepted_len=sum(entry.emitted for entry in run.acceptance) / rounds if rounds else None,
        accepted_len_interval=accepted_len_interval(run.acceptance),
        conditional_acceptance=conditional_acceptance(run, gamma),
        quality=None if blocks is None else evaluate(Calibration.identity(gamma), blocks),
        calibrated=None if blocks is None or calibration is None else evaluate(calibration, blocks),
        sweep=() if blocks is None else threshold_sweep(used, blocks),
    )


def merge(runs: Sequence[EvaluationRun]) -> EvaluationRun:
    """Return one run over all requests and blocks of `runs`."""
    blocks = [run.blocks for run in runs if run.blocks is not None]
    return EvaluationRun(
        acceptance=[entry for run in runs for entry in run.acceptance],
        blocks=Observations(
            np.concatenate([entry.logits for entry in blocks]), np.concatenate([entry.accepted for entry in blocks])
        )
        if blocks
        else None,
    )


def conditional_acceptance(run: EvaluationRun, gamma: int) -> tuple[float | None, ...]:
    """Return [gamma] P(draft k accepted | drafts before k accepted); None where no block got to k.

    Counted over whole blocks. Without a confidence head only counters of emitted tokens exist: there a draft behind a
    stop, or cut off by the end of the request, counts as rejected.
    """
    if run.blocks is not None:
        accepted = [int(run.blocks.survived(position).sum()) for position in range(gamma)]
        reached = [len(run.blocks), *accepted[:-1]]
    else:
        accepted = [sum(entry.accepted_per_position[position] for entry in run.acceptance) for position in range(gamma)]
        reached = [sum(entry.verified_per_position[0] for entry in run.acceptance), *accepted[:-1]]
    return tuple(count / total if total else None for count, total in zip(accepted, reached, strict=True))


def accepted_len_interval(acceptance: Sequence[AcceptanceStatistics]) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of tokens per round, prompts resampled; None with fewer than two prompts."""
    counted = [(entry.emitted, entry.rounds) for entry in acceptance if entry.rounds]
    if len(counted) < 2:
        return None
    pairs = np.array(counted, np.float64)
    # A fixed seed: the same run prints the same interval.
    drawn = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    emitted, rounds = pairs[drawn].sum(axis=1).T
    low, high = np.percentile(emitted / rounds, INTERVAL)
    return float(low), float(high)


def threshold_sweep(
    calibration: Calibration, blocks: Observations, thresholds: Sequence[float] = THRESHOLDS
) -> tuple[ThresholdPoint, ...]:
    """Return what each threshold on the calibrated survival would have verified and emitted of the same blocks.

    The anchors stay those of the full-block run: a schedule that cuts blocks starts some of them elsewhere.

    Source: DSpark paper, Figure 6.
    """
    survival = calibration.survival(blocks.logits)
    return tuple(_point(threshold, survival, blocks.accepted) for threshold in thresholds)


def _point(threshold: float, survival: NDArray[np.float64], accepted: NDArray[np.int64]) -> ThresholdPoint:
    verified = np.cumprod(survival >= threshold, axis=1).sum(axis=1)
    kept = np.minimum(accepted, verified)
    total = int(verified.sum())
    return ThresholdPoint(
        threshold=threshold,
        verified=float(verified.mean()),
        accepted_len=float(1 + kept.mean()),
        wasted=float(1 - kept.sum() / total) if total else None,
    )


def _quality_json(quality: Quality) -> dict[str, Any]:
    # NaN (an AUC of one class) is no JSON.
    return {
        "mean_ece": quality.mean_ece,
        "ece": list(quality.ece),
        "auc": [None if np.isnan(value) else value for value in quality.auc],
    }
