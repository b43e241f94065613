"""The CSV log: one row a step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TextIO

from trtllm_dspark.errors import DeviceError
from trtllm_dspark.train.trainer import StepReport


class StepLog:
    """A file that gains a row a step and loses those that a resumed run does again.

    Args:
        path: the file.
        block_size: gamma, for the columns of the positions.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        self._path, self._block_size = path, block_size
        self._stream: TextIO | None = None

    def restart(self) -> None:
        """Begin anew."""
        self._path.unlink(missing_ok=True)

    def cut(self, steps_done: int) -> None:
        """Drop rows of later steps and a row that was cut off."""
        if not self._path.exists():
            return
        lines = self._path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines[1:] if line.endswith("\n") and int(line.partition(",")[0]) <= steps_done]
        self._path.write_text("".join(lines[:1] + kept), "utf-8")

    def write(self, report: StepReport) -> None:
        """Add a row.

        Raises:
            DeviceError: the disk is full or fails.
        """
        try:
            if self._stream is None:
                self._stream = self._path.open("a", newline="", encoding="utf-8")
                if self._stream.tell() == 0:
                    csv.writer(self._stream, lineterminator="\n").writerow(_header(self._block_size))
            csv.writer(self._stream, lineterminator="\n").writerow(_row(report))
            self._stream.flush()
        except OSError as error:
            raise DeviceError(
                f"{self._path} cannot be written ({error.strerror}); free space and go on with --resume"
            ) from error

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _header(gamma: int) -> list[str]:
    names = ["step", "lr_scale", "loss", "cross_entropy", "l1", "confidence", "tau"]
    return [*names, *(f"accept_{k}" for k in range(1, gamma + 1)), "blocks", "rows", "seconds", "capture_seconds"]


def _row(report: StepReport) -> list[str]:
    values = [report.lr_scale, report.loss, report.cross_entropy, report.l1, report.confidence, report.tau]
    numbers = [f"{value:.6g}" for value in (*values, *report.accept)]
    times = [f"{report.seconds:.3f}", f"{report.capture_seconds:.3f}"]
    return [str(report.step), *numbers, str(report.num_blocks), str(report.num_rows), *times]
