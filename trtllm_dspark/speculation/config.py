"""`--speculation`: which drafts are verified."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trtllm_dspark.errors import ConfigError

SpeculationMode = Literal["off", "fixed", "threshold", "early_stop", "stale_topk", "adaptive"]
DEFAULT_SPECULATION = "adaptive"
DEFAULT_THRESHOLD = 0.3
MAX_DRAFTS = 2**31 - 1
FORMS = "adaptive, off, fixed[:G], threshold[:C], early_stop or stale_topk[:B]"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How many drafts of each request a round verifies.

    Attributes:
        mode: `off` decodes plainly; `fixed` verifies the same number for every request; `threshold` while the running
            product of confidences stays at or above a number; `early_stop` is the paper's Algorithm 1; `stale_topk`
            its section 5.2; `adaptive` verifies what pays by the cost table and decodes plainly where nothing does.
        draft_len: G of `fixed`: drafts verified, at most the trained block; None = the whole block.
        threshold: C of `threshold`, in [0, 1].
        budget: B of `stale_topk`: drafts verified over all requests; None = from the cost table.
    """

    mode: SpeculationMode
    draft_len: int | None = None
    threshold: float = DEFAULT_THRESHOLD
    budget: int | None = None

    @staticmethod
    def parse(text: str) -> SpeculationConfig:
        """Read `adaptive`, `off`, `fixed`, `fixed:3`, `threshold:0.3`, `early_stop`, `stale_topk` or `stale_topk:12`.

        Raises:
            ConfigError: another form, or a number out of range.
        """
        name, colon, argument = text.strip().partition(":")
        if name == "fixed":
            return SpeculationConfig("fixed", draft_len=_integer(text, argument, 1) if colon else None)
        if name == "threshold":
            return SpeculationConfig(
                "threshold", threshold=_probability(text, argument) if colon else DEFAULT_THRESHOLD
            )
        if name == "stale_topk":
            return SpeculationConfig("stale_topk", budget=_integer(text, argument, 0) if colon else None)
        if name == "off" and not colon:
            return SpeculationConfig("off")
        if name == "early_stop" and not colon:
            return SpeculationConfig("early_stop")
        if name == "adaptive" and not colon:
            return SpeculationConfig("adaptive")
        raise ConfigError(f"speculation '{text}' is not known; use {FORMS}")

    @property
    def needs_confidence(self) -> bool:
        """Whether the drafter must have a confidence head."""
        return self.mode in ("threshold", "early_stop", "stale_topk", "adaptive")

    @property
    def compares_requests(self) -> bool:
        """Whether drafts of one request are verified or not because of the confidences of others."""
        return self.mode in ("early_stop", "stale_topk", "adaptive")

    @property
    def needs_cost_table(self) -> bool:
        """Whether step times of the engine must be known."""
        return self.mode in ("early_stop", "adaptive") or (self.mode == "stale_topk" and self.budget is None)

    def __str__(self) -> str:
        """Return the form that `parse` reads."""
        if self.mode == "fixed" and self.draft_len is not None:
            return f"fixed:{self.draft_len}"
        if self.mode == "threshold":
            return f"threshold:{self.threshold:g}"
        if self.mode == "stale_topk" and self.budget is not None:
            return f"stale_topk:{self.budget}"
        return self.mode


def _integer(text: str, argument: str, low: int) -> int:
    try:
        value = int(argument)
    except ValueError:
        value = low - 1
    if not low <= value <= MAX_DRAFTS:
        raise ConfigError(f"speculation '{text}': '{argument}' must be a whole number from {low} to {MAX_DRAFTS}")
    return value


def _probability(text: str, argument: str) -> float:
    try:
        value = float(argument)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ConfigError(f"speculation '{text}': '{argument}' must be a number from 0 to 1")
    return value
