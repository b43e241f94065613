"""What the rounds of a plugin engine were compiled for, and how other schedules are played on them.

Acceptance and schedule are fields of plugin nodes. A round that verifies a fixed number of drafts needs no schedule of
its own: whatever is compiled, it verifies all that caps and budget admit once every draft passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trtllm_dspark.engine.rounds import DecodeRows, DeviceSchedule, RoundBatch, RowSampling
from trtllm_dspark.engine.tensorrt._arrays import ACCEPTANCES, SCHEDULE_MODES
from trtllm_dspark.errors import ConfigError, DeviceError, EngineError

_PLAYED_AS = {"adaptive": "threshold"}
"""Speculation mode -> schedule it is played as, where their names differ."""


@dataclass(frozen=True, slots=True)
class CompiledRound:
    """What every round of an engine does.

    Attributes:
        schedule: mode of the draft plan.
        acceptance: mode of the verify plan; `greedy` serves requests of temperature 0 only.

    Raises:
        EngineError: a name is not known.
    """

    schedule: str
    acceptance: str

    def __post_init__(self) -> None:
        for what, value, known in (
            ("schedule", self.schedule, SCHEDULE_MODES),
            ("acceptance", self.acceptance, ACCEPTANCES),
        ):
            if value not in known:
                raise EngineError(f"the engine's {what} is {value!r}, which this version does not know; build it again")

    @property
    def greedy_only(self) -> bool:
        """Whether requests must be greedy."""
        return self.acceptance == "greedy"

    def check(self, mode: str, acceptance: str) -> None:
        """Refuse sessions whose rounds were not compiled.

        Args:
            mode: of their speculation.
            acceptance: of their sampled requests.

        Raises:
            ConfigError: the engine was built for others.
        """
        schedule = _PLAYED_AS.get(mode, mode)
        if schedule not in ("off", "fixed", self.schedule):
            raise ConfigError(
                f"this engine's plugins were built for schedule {self.schedule}, speculation {mode} needs {schedule}; "
                f"build it with --schedule {schedule}, or speculate with {self._choices()}"
            )
        if acceptance != self.acceptance and not self.greedy_only:
            raise ConfigError(
                f"this engine's plugins were built for acceptance {self.acceptance}, the session wants {acceptance}; "
                f"build it with --acceptance {acceptance}, or choose {self.acceptance}"
            )

    def _choices(self) -> str:
        others = ["adaptive"] if self.schedule == "threshold" else []
        return ", ".join(["off", "fixed:K", *(name for name in [self.schedule] if name != "fixed"), *others])

    def play(self, batch: RoundBatch) -> RoundBatch:
        """Return a round as the compiled plans play it.

        Raises:
            DeviceError: they cannot.
        """
        if batch.acceptance != self.acceptance and not self.greedy_only:
            raise DeviceError(f"the plans accept by {self.acceptance}, not by {batch.acceptance}")
        for rows in (batch.decode, batch.prompts):
            if rows is not None:
                self._check_sampling(rows.sampling)
        if batch.decode is None or batch.decode.schedule is None:
            return batch
        return replace(batch, decode=self._play(batch.decode, batch.decode.schedule))

    def _check_sampling(self, sampling: RowSampling) -> None:
        if sampling.ban_until.any():
            raise DeviceError("the plans choose tokens themselves and cannot be told to leave some out")
        if self.greedy_only and sampling.temperature.any():
            raise DeviceError("the plans accept by greedy, which samples nothing")

    def _play(self, decode: DecodeRows, schedule: DeviceSchedule) -> DecodeRows:
        if schedule.mode == self.schedule:
            return decode
        if schedule.mode != "fixed":
            raise DeviceError(f"the plans schedule by {self.schedule}, not by {schedule.mode}")
        most = np.minimum(decode.max_drafts, schedule.draft_len)
        if self.schedule == "threshold":
            schedule = replace(schedule, mode="threshold", threshold=0.0)
        elif self.schedule == "early_stop":
            # Times that are none count as a missing table: all drafts are verified.
            schedule = replace(schedule, mode="early_stop", step_time_us=np.full(1, np.nan, np.float32))
        else:
            schedule = replace(schedule, mode="stale_topk", budget=int(most.sum()))
        return replace(decode, max_drafts=most, schedule=schedule)
