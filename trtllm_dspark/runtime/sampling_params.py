"""How one request wants its tokens chosen and when it ends."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from trtllm_dspark.errors import RequestError, shown
from trtllm_dspark.runtime.unicode_text import check_unicode

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this choose the most likely token: a softmax that sharp is an argmax anyway."""
MAX_SEED = 2**64 - 1
MAX_STOP_STRINGS = 64
LatencyClass = Literal["interactive", "batch"]
LATENCY_CLASSES: tuple[LatencyClass, ...] = get_args(LatencyClass)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Attributes:
        temperature: 0 chooses the most likely token (greedy).
        top_k: sample among the k most likely tokens; 0 = all.
        top_p: sample among the most likely tokens that together hold this probability; 1 = all.
        seed: same seed, same text for the same prompt and options (in `rejection` mode with `adaptive`, `early_stop`,
            `stale_topk` or a token budget that can cut drafts the law is kept, not the text: docs/losslessness.md);
            None draws a new one every time.
        max_tokens: output tokens at most, the end-of-sequence token included.
        min_tokens: end-of-sequence and stop tokens cannot be chosen, and stop strings do not end the request, before
            this many output tokens.
        stop: strings that end the request; the text is cut before them.
        stop_token_ids: tokens that end the request beside the model's own; they appear in the ids, not in the text.
        ignore_eos: go on past the model's own end-of-sequence tokens.
        speculation: False decodes this request without drafts, whatever the session does.
        max_draft_len: most drafts of this request verified in one round; None = the session's.
        latency_class: `interactive` or `batch`; where a round cannot verify every draft, interactive requests keep
            more of theirs.
        logprobs: also return the log-probability of every output token under the target's own distribution.

    Raises:
        RequestError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    speculation: bool = True
    max_draft_len: int | None = None
    logprobs: bool = False
    latency_class: LatencyClass = "interactive"

    def __post_init__(self) -> None:
        _require_real(
            "temperature", self.temperature, "a number of at least 0 within 32 bits", lambda value: value >= 0
        )
        _require_real("top_p", self.top_p, "above 0 within 32 bits and at most 1", lambda value: 0 < value <= 1)
        _require_int("top_k", self.top_k, 0, 2**31 - 1)
        _require_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _require_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, MAX_SEED)
        if self.max_draft_len is not None:
            _require_int("max_draft_len", self.max_draft_len, 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}; lower it",
                code="invalid_min_tokens",
            )
        for name in ("ignore_eos", "speculation", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be true or false, got {shown(getattr(self, name))}", code=f"invalid_{name}"
                )
        if self.latency_class not in LATENCY_CLASSES:
            raise RequestError(
                f"latency_class must be {' or '.join(LATENCY_CLASSES)}, got {shown(self.latency_class)}",
                code="invalid_latency_class",
            )
        self._check_stops()

    def _check_stops(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed", code="invalid_stop"
            )
        for text in stops:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {shown(text)}", code="invalid_stop")
            check_unicode("stop", text, code="invalid_stop")
        token_ids = _items("stop_token_ids", self.stop_token_ids)
        for token in token_ids:
            _require_int("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(map(int, token_ids)))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature < GREEDY_TEMPERATURE


def _require_real(name: str, value: object, expected: str, fits: Callable[[float], bool]) -> None:
    number = _float32(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and fits(number) and fits(value)):  # type: ignore[arg-type]
        raise RequestError(f"{name} must be {expected}, got {shown(value)}", code=f"invalid_{name}")


def _float32(value: Real) -> float:
    """Return what the core will compute with: a number may become zero or infinite there."""
    try:
        return float(struct.unpack("f", struct.pack("f", float(value)))[0])
    except OverflowError:
        return math.inf


def _items(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"{name} must be a list, got {shown(value)}", code=f"invalid_{name}")
    return tuple(value)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise RequestError(
            f"{name} must be an integer from {low} to {high}, got {shown(value)}", code=f"invalid_{name}"
        )
