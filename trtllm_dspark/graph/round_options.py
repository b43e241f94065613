"""What the round of a plugin engine is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from trtllm_dspark.errors import ConfigError

Acceptance = Literal["greedy", "rejection", "coupled"]
Schedule = Literal["fixed", "threshold", "early_stop", "stale_topk"]
_MAX_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """What the round of a plugin engine is compiled for; everything else about a round is an input of its graphs.

    Attributes:
        acceptance: `rejection` and `coupled` also serve greedy requests; `greedy` serves no others.
        schedule: how verify lengths are chosen; without a confidence head only `fixed`.
        num_candidates: C > 0 restricts every draft token to the C largest base logits, 0 = dense.
        int8_heads: keep the Markov factors in int8 with one scale a row, half the bytes of float16.

    Raises:
        ConfigError: a value is out of range.
    """

    acceptance: Acceptance = "rejection"
    schedule: Schedule = "threshold"
    num_candidates: int = 0
    int8_heads: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("acceptance", self.acceptance, get_args(Acceptance)),
            ("schedule", self.schedule, get_args(Schedule)),
        ):
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not 0 <= self.num_candidates <= _MAX_CANDIDATES:
            raise ConfigError(f"num_candidates must be 0 to {_MAX_CANDIDATES}, got {self.num_candidates}")

    @property
    def accept_candidates(self) -> int:
        """Candidates that acceptance looks at: greedy drafts are point masses whatever they were chosen from."""
        return 0 if self.acceptance == "greedy" else self.num_candidates
