"""What a run leaves behind, simulated or measured: one record a request, one row a round, and the figures of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]


@dataclass(slots=True)
class RequestRecord:
    """One request.

    Attributes:
        index: its number.
        domain: its domain, or "".
        arrival_s: when it was sent.
        prompt_tokens: tokens of its prompt.
        scheduled_s: when it got a slot, or None.
        first_token_s: when its first token was known, or None.
        last_token_s: when its last token so far was known, or None.
        output_tokens: tokens emitted.
        verified: drafts verified.
        accepted: drafts accepted.
        rounds: verify rounds.
        replica: which replica served it.
        error: why it was refused or failed, or "".
    """

    index: int
    domain: str
    arrival_s: float
    prompt_tokens: int
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    verified: int = 0
    accepted: int = 0
    rounds: int = 0
    replica: int = 0
    error: str = ""

    @property
    def user_speed(self) -> float | None:
        """Tokens a second after the first one, as its user sees them; None of fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return None
        return (self.output_tokens - 1) / (self.last_token_s - self.first_token_s)


@dataclass(slots=True)
class RoundLog:
    """Rows of the rounds of one replica, as columns that grow.

    Attributes:
        start_s: when a round began.
        duration_us: what it took.
        num_requests: requests that decoded.
        drafts: drafts verified.
        accepted: drafts accepted.
        drafted: requests that drafted.
        waiting: requests without a slot.
        first_tokens: requests whose prompt was finished, each of which emits one token.
    """

    start_s: list[float] = field(default_factory=list)
    duration_us: list[float] = field(default_factory=list)
    num_requests: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self.start_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run.

    Attributes:
        requests: requests that ended normally.
        failed: requests refused or failed.
        seconds: from the first arrival to the last token; of the steady part where one was cut out.
        throughput: output tokens a second.
        user_speed: percentiles 5, 50 and 95 of tokens a second and user; the mean is `user_mean`.
        ttft_ms: percentiles 50, 95 and 99 of the time to the first token.
        verify_budget: mean drafts verified of a decoding request and round; None where rounds are not known.
        accepted_len: tokens emitted a verify round, bonus included.
        wasted: share of verified drafts that were not accepted; None when none was verified.
        concurrency: mean requests that decode in a round; None where rounds are not known.
        rounds: rounds.
    """

    requests: int
    failed: int
    seconds: float
    throughput: float
    user_mean: float
    user_speed: tuple[float, float, float]
    ttft_ms: tuple[float, float, float]
    verify_budget: float | None
    accepted_len: float | None
    wasted: float | None
    concurrency: float | None
    rounds: int

    def as_json(self) -> dict[str, Any]:
        """Return the figures under their names, percentiles spelled out."""
        return {
            "requests": self.requests,
            "failed": self.failed,
            "seconds": round(self.seconds, 4),
            "tokens_per_s": round(self.throughput, 3),
            "user_tokens_per_s": round(self.user_mean, 3),
            "user_tokens_per_s_p5": round(self.user_speed[0], 3),
            "user_tokens_per_s_p50": round(self.user_speed[1], 3),
            "user_tokens_per_s_p95": round(self.user_speed[2], 3),
            "ttft_ms_p50": round(self.ttft_ms[0], 3),
            "ttft_ms_p95": round(self.ttft_ms[1], 3),
            "ttft_ms_p99": round(self.ttft_ms[2], 3),
            "verify_budget": _rounded(self.verify_budget),
            "accepted_len": _rounded(self.accepted_len),
            "wasted_share": _rounded(self.wasted),
            "concurrency": _rounded(self.concurrency),
            "rounds": self.rounds,
        }


def summarise(records: Sequence[RequestRecord], logs: Sequence[RoundLog] = ()) -> Summary:
    """Return the figures of a run.

    Args:
        records: all requests.
        logs: rounds of every replica; without them what rounds tell is left out.
    """
    done = [record for record in records if not record.error and record.last_token_s is not None]
    tokens = sum(record.output_tokens for record in done)
    start = min((record.arrival_s for record in done), default=0.0)
    seconds = max((record.last_token_s or 0.0 for record in done), default=0.0) - start
    speeds = [speed for record in done if (speed := record.user_speed) is not None]
    first = [(record.first_token_s - record.arrival_s) * 1e3 for record in done if record.first_token_s is not None]
    verified, accepted = sum(record.verified for record in done), sum(record.accepted for record in done)
    rounds = sum(record.rounds for record in done)
    decoding = sum(sum(log.num_requests) for log in logs)
    drafts = sum(sum(log.drafts) for log in logs)
    steps = sum(sum(1 for count in log.num_requests if count) for log in logs)
    return Summary(
        requests=len(done),
        failed=len(records) - len(done),
        seconds=seconds,
        throughput=tokens / seconds if seconds > 0 else 0.0,
        user_mean=float(np.mean(speeds)) if speeds else 0.0,
        user_speed=_percentiles(speeds, (5, 50, 95)),
        ttft_ms=_percentiles(first, (50, 95, 99)),
        verify_budget=drafts / decoding if decoding else None,
        accepted_len=accepted / rounds + 1 if rounds else None,
        wasted=1 - accepted / verified if verified else None,
        concurrency=decoding / steps if steps else None,
        rounds=sum(map(len, logs)),
    )


def _percentiles(values: Sequence[float], wanted: tuple[float, float, float]) -> tuple[float, float, float]:
    if not values:
        return (0.0, 0.0, 0.0)
    low, middle, high = np.percentile(values, wanted).tolist()
    return (low, middle, high)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
