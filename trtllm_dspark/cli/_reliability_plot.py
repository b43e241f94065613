"""`calibrate --plot`: what confidences promise against what happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trtllm_dspark.errors import UsageError
from trtllm_dspark.reports import Series, line_plot
from trtllm_dspark.reports.files import write_text
from trtllm_dspark.speculation.calibration import NUM_BINS, Calibration, Observations

LEAST = 10
"""A bin with fewer drafts is left out: its frequency is chance."""


def check_plot(path: Path) -> None:
    """Refuse an image that could not be written, before anything is generated.

    Raises:
        UsageError: not an SVG.
    """
    if path.suffix != ".svg":
        raise UsageError(f"--plot {path}: give a name that ends in .svg")


def write_plot(path: Path, judged: Observations, calibrations: Sequence[tuple[str, Calibration]]) -> None:
    """Draw for each calibration the share of drafts that survived over the survival it predicts, all positions.

    The band is two standard errors of the share wide on either side.

    Raises:
        DeviceError: the file cannot be written.
    """
    series = [Series("as promised", [0.0, 1.0], [0.0, 1.0], style="line", colour="#999999", dash=1)]
    for name, calibration in calibrations:
        predicted = calibration.survival(judged.logits).reshape(-1)
        outcome = (np.arange(judged.logits.shape[1]) < judged.accepted[:, None]).reshape(-1)
        index = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        count = np.bincount(index, minlength=NUM_BINS)
        bins = np.flatnonzero(count >= LEAST)
        mean = np.bincount(index, predicted, NUM_BINS)[bins] / count[bins]
        share = np.bincount(index, outcome, NUM_BINS)[bins] / count[bins]
        error = 2 * np.sqrt(share * (1 - share) / count[bins])
        low, high = np.maximum(share - error, 0.0), np.minimum(share + error, 1.0)
        series.append(Series(name, mean.tolist(), share.tolist(), low.tolist(), high.tolist()))
    text = line_plot(
        series,
        title="Reliability of the confidence head",
        x_label="predicted survival of a draft",
        y_label="share that survived",
        x_limits=(0.0, 1.0),
        y_limits=(0.0, 1.0),
    )
    write_text(path, text)
