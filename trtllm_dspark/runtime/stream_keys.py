"""Keys of the requests' random streams."""

from __future__ import annotations

import secrets

from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.speculation import SpeculationConfig

_MASK = (1 << 64) - 1


class StreamKeys:
    """Give every request of a session the key of its random streams.

    Equal keys at equal positions draw equal noise. In `rejection` mode that is harmless only while what is verified of
    one request does not depend on the others: otherwise a mate's confidences, or whether it is still there to share a
    token budget, know this request's draft tokens, and the output leaves the target's distribution
    (docs/losslessness.md). Where verify lengths depend on other requests, equal seeds therefore become different keys;
    there a seed fixes the text of the same requests in the same order, and no more.

    Args:
        speculation: the session's rule.
        acceptance: `rejection` or `coupled`; coupled output is a function of seed and logits whatever is verified.
        limits: shapes that decide whether the token budget of a round can cut drafts.
        draft_len: drafts the session verifies of a request at most.
        learns: whether limits of the load, or a calibration that learns from every request, decide what is verified.
    """

    def __init__(
        self,
        speculation: SpeculationConfig,
        acceptance: str,
        limits: EngineLimits,
        *,
        draft_len: int,
        learns: bool = False,
    ) -> None:
        # Drafts get at least half of what the anchors leave of a round: see Batcher.plan.
        room = (limits.max_num_tokens - limits.max_batch_size) // 2
        budget_binds = limits.max_batch_size * draft_len > room
        others_decide = speculation.compares_requests or budget_binds or learns
        # Where nothing is ever verified, whatever the mode asked for, nobody's noise is known to anybody.
        self._distinct = draft_len > 0 and acceptance == "rejection" and others_decide
        self._serial = 0

    def key(self, seed: int | None) -> int:
        """Return the key of the next request: a new random one without a seed."""
        if seed is None:
            return secrets.randbits(63)
        if not self._distinct:
            return seed
        self._serial += 1
        return _mixed(seed, self._serial)


def _mixed(seed: int, serial: int) -> int:
    """Return 64 well-mixed bits of both numbers; one seed never gives two serials the same key.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit integers.
    """
    value = (seed + serial * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
