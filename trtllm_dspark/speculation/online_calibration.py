"""Calibration that follows what is observed while serving, with a guard and a drift alarm."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.speculation.calibration import Calibration
from trtllm_dspark.speculation.online_error import label_error, log_likelihood
from trtllm_dspark.speculation.online_fit import fit_window
from trtllm_dspark.speculation.online_window import Blocks, BlockWindow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnlineConfig:
    """Numbers of `OnlineCalibration`; docs/calibration.md explains them.

    Attributes:
        window: blocks kept.
        recent: newest blocks that the guard and the alarm judge by.
        least: blocks with labels before anything is judged.
        every: rounds between two updates.
        sigmas: standard errors by which held-out blocks must be likelier for another calibration to take over.
        sigmas_in_error: the same while the one in force errs by `drift_off` or more: then less proof is asked.
        small: error of the calibration in force under which only every `patience`-th update fits.
        patience: see `small`.
        drift_on: error of the stored calibration from which the alarm is raised.
        drift_off: error under which it is cleared.
    """

    window: int = 2048
    recent: int = 512
    least: int = 128
    every: int = 64
    sigmas: float = 2.0
    sigmas_in_error: float = 1.0
    small: float = 0.02
    patience: int = 3
    drift_on: float = 0.08
    drift_off: float = 0.04


@dataclass(frozen=True)
class CalibrationStatus:
    """What `OnlineCalibration` knows, for metrics.

    Attributes:
        error: calibration error of the calibration in force over recent blocks; NaN before there are enough.
        error_stored: of the stored one, over the same blocks.
        drift: whether the stored calibration no longer describes what is observed.
        updates: times the guard let new parameters in.
        rollbacks: times it went back to older ones.
        blocks: blocks seen that carried labels.
    """

    error: float = float("nan")
    error_stored: float = float("nan")
    drift: bool = False
    updates: int = 0
    rollbacks: int = 0
    blocks: int = 0


class OnlineCalibration:
    """Keep temperatures and biases in step with what drafts turn out to be.

    Everything rests on rounds that are over and acts on rounds to come, so the schedules stay causal
    (docs/losslessness.md). One thread calls everything.

    Args:
        stored: what `trtllm-dspark calibrate` fitted, or `Calibration.identity`.
        config: numbers.
    """

    def __init__(self, stored: Calibration, config: OnlineConfig | None = None) -> None:
        self.config = config or OnlineConfig()
        self.stored = stored
        self.calibration = stored
        self.status = CalibrationStatus()
        self._previous = stored
        self._adopted_at = 0
        self._window = BlockWindow(len(stored.temperature), self.config.window)
        self._pending: list[tuple[FloatArray, IntArray, IntArray]] = []
        self._updates = 0

    def arrays(self, num_positions: int) -> tuple[FloatArray, FloatArray]:
        """Return temperatures and biases of the first positions, [num_positions] float32 each, for the next round."""
        return self.calibration.arrays(num_positions)

    def observe(self, confidence: FloatArray, verify_len: IntArray, accepted: IntArray) -> None:
        """Take the outcome of one round; every `config.every` rounds the parameters are reconsidered.

        Args:
            confidence: [N, n] float32 as the head gives them, without calibration; kept, not copied.
            verify_len: [N] int64 drafts verified.
            accepted: [N] int64 drafts accepted, before stops cut them.
        """
        self._pending.append((confidence, verify_len, accepted))
        if len(self._pending) >= self.config.every:
            self._update()

    def _update(self) -> None:
        confidence, verified, accepted = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        self._pending.clear()
        self._window.add(confidence, verified, accepted)
        self._updates += 1
        blocks = self._window.blocks()
        if len(blocks) < self.config.least:
            return
        recent = blocks.newest(self.config.recent)
        self._judge(recent)
        fits = self.status.error < self.config.small and self._updates % self.config.patience
        if not self._rolled_back(blocks) and not fits:
            self._refit(blocks, recent)

    def _judge(self, recent: Blocks) -> None:
        """Measure both calibrations on recent blocks and raise or clear the alarm."""
        error, stored = label_error(self.calibration, recent)[1], label_error(self.stored, recent)[1]
        # Of fewer blocks the error is mostly chance.
        sure = len(recent) >= self.config.recent
        drift = sure and stored > (self.config.drift_off if self.status.drift else self.config.drift_on)
        if drift and not self.status.drift:
            logger.warning(
                "confidences have drifted from the stored calibration (error %.3f); they are corrected while serving, "
                "trtllm-dspark calibrate stores the correction",
                stored,
            )
        elif self.status.drift and not drift:
            logger.info("confidences fit the stored calibration again (error %.3f)", stored)
        self.status = replace(self.status, error=error, error_stored=stored, drift=drift, blocks=self._window.count)

    def _rolled_back(self, blocks: Blocks) -> bool:
        """Go back to what the last update replaced where the blocks since then speak for it."""
        if self._previous is self.calibration:
            return False
        since = blocks.since(self._adopted_at)
        if len(since) < self.config.least or not self._better(self._previous, since, since):
            return False
        self.calibration = self._previous
        self.status = replace(self.status, rollbacks=self.status.rollbacks + 1)
        return True

    def _refit(self, blocks: Blocks, recent: Blocks) -> None:
        """Fit all blocks and the recent ones in turn; let the fit in where held-out blocks speak for it."""
        part = recent if self._updates % 2 else blocks
        fitted = fit_window(part.fitted_on(), start=self.calibration, stored=self.stored)
        if self._better(fitted, part.held_out(), recent.held_out()):
            self._previous, self.calibration = self.calibration, fitted
            self._adopted_at = self._window.count
            self.status = replace(self.status, updates=self.status.updates + 1)

    def _better(self, other: Calibration, judged: Blocks, recent: Blocks) -> bool:
        """Return whether another calibration is surely likelier on `judged`, and in no way worse on `recent`."""
        gain = log_likelihood(other, judged) - log_likelihood(self.calibration, judged)
        errs = self.status.error >= self.config.drift_off
        sigmas = self.config.sigmas_in_error if errs else self.config.sigmas
        if gain.mean() <= sigmas * gain.std() / np.sqrt(len(gain)):
            return False
        if log_likelihood(other, recent).sum() < log_likelihood(self.calibration, recent).sum():
            return False
        return label_error(other, recent)[0] < label_error(self.calibration, recent)[0]
