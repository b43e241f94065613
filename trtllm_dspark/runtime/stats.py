"""Counters of one request and of a whole session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtllm_dspark.speculation.statistics import AcceptanceStatistics


@dataclass(slots=True)
class RequestStats:
    """Counters and times of one request.

    Attributes:
        num_prompt_tokens: tokens of the prompt.
        num_output_tokens: tokens emitted so far.
        acceptance: what its verify rounds drafted, verified, accepted and emitted.
        arrived: clock when the request was added, seconds.
        scheduled: clock when it got a slot, or None.
        first_token: clock when its first token was known, or None.
        last_token: clock when its latest token was known, or None.
    """

    num_prompt_tokens: int
    max_draft_len: int
    arrived: float
    num_output_tokens: int = 0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    acceptance: AcceptanceStatistics = field(init=False)

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceStatistics(self.max_draft_len)

    def note_tokens(self, count: int, now: float) -> None:
        """Count tokens that became known at clock `now`."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        self.num_output_tokens += count

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from arrival to the first token."""
        return None if self.first_token is None else (self.first_token - self.arrived) * 1e3

    @property
    def elapsed_s(self) -> float:
        """Seconds from arrival to the latest token."""
        return 0.0 if self.last_token is None else self.last_token - self.arrived

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second from arrival to the latest token."""
        return self.num_output_tokens / self.elapsed_s if self.elapsed_s > 0 else None

    def as_json(self) -> dict[str, Any]:
        """Return the counters under the names of `run --json` (docs/file_formats.md)."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            **self.acceptance.as_json(),
            "ttft_ms": self.ttft_ms,
            "elapsed_s": self.elapsed_s,
            "tokens_per_s": self.tokens_per_s,
        }


@dataclass(slots=True)
class SessionStats:
    """Counters of a session since it was made.

    Attributes:
        rounds: rounds that ran at least one pass.
        verify_passes: target passes over decoding requests.
        prefill_passes: target passes over prompt chunks.
        draft_passes: drafter block passes.
        prompt_tokens: prompt tokens prefilled.
        output_tokens: tokens emitted.
        finished: finished requests by finish reason.
        slot_copies: slots moved to keep the active ones compact.
        engine_s: seconds inside engine passes.
        core_s: seconds inside the native core's operations.
        round_s: seconds inside `submit` and `collect`.
        plans: decoding rounds by what was decided about them (`Reason` of speculation.controller).
    """

    max_draft_len: int
    rounds: int = 0
    verify_passes: int = 0
    prefill_passes: int = 0
    draft_passes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    slot_copies: int = 0
    engine_s: float = 0.0
    core_s: float = 0.0
    round_s: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    plans: dict[str, int] = field(default_factory=dict)
    acceptance: AcceptanceStatistics = field(init=False)

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceStatistics(self.max_draft_len)

    def set_draft_len(self, max_draft_len: int) -> None:
        """Count over another number of positions, from zero."""
        self.max_draft_len = max_draft_len
        self.acceptance = AcceptanceStatistics(max_draft_len)
