"""Acceptance counters: what was drafted, verified, accepted and emitted, by position in the block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class AcceptanceStatistics:
    """Counters over verify rounds; a verify round is one target pass over one decoding request.

    Attributes:
        max_draft_len: gamma, length of the per-position lists.
        rounds: verify rounds.
        drafted: draft tokens proposed.
        emitted: tokens the verify rounds emitted, bonus included; a block clipped by a stop counts what was emitted.
        verified_per_position: [gamma], rounds in which draft token k was verified.
        accepted_per_position: [gamma], rounds in which draft token k was accepted and emitted.
    """

    max_draft_len: int
    rounds: int = 0
    drafted: int = 0
    emitted: int = 0
    verified_per_position: list[int] = field(init=False)
    accepted_per_position: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.verified_per_position = [0] * self.max_draft_len
        self.accepted_per_position = [0] * self.max_draft_len

    def record(self, *, drafted: int, verified: int, accepted: int, emitted: int) -> None:
        """Count one verify round.

        Args:
            drafted: drafts proposed.
            verified: drafts whose target logits were computed (ell).
            accepted: drafts accepted and emitted.
            emitted: tokens emitted, at most accepted + 1.
        """
        self.rounds += 1
        self.drafted += drafted
        self.emitted += emitted
        for position in range(verified):
            self.verified_per_position[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @property
    def verified(self) -> int:
        """Draft tokens verified, anchors excluded."""
        return sum(self.verified_per_position)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted and emitted."""
        return sum(self.accepted_per_position)

    @property
    def accepted_len(self) -> float | None:
        """tau: tokens emitted per verify round, bonus included; None before the first round."""
        return self.emitted / self.rounds if self.rounds else None

    def as_json(self) -> dict[str, Any]:
        """Return the counters under the names of `run --json` (docs/file_formats.md)."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "verified_per_position": list(self.verified_per_position),
            "accepted_per_position": list(self.accepted_per_position),
            "accepted_len": self.accepted_len,
        }
