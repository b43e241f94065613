"""Acceptance profiles: how often drafts are accepted, by domain (docs/file_formats.md)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.errors import ConfigError, DeviceError, UsageError
from trtllm_dspark.simulate.blocks import Blocks, ConfidenceModel, draw_blocks
from trtllm_dspark.speculation import Calibration

SCHEMA = "trtllm_dspark.acceptance"
SCHEMA_VERSION = 2
"""Version 1 knew no `starts`; it is still read."""
POOL_SIZE = 16384
"""Blocks drawn for a domain; a request walks through them from a place of its own."""


@dataclass(frozen=True)
class AcceptanceProfile:
    """How often the drafts of a drafter are accepted.

    Attributes:
        name: shown in reports.
        source: where the numbers come from: measured with what, published where, or assumed.
        conditional: domain -> [gamma] acceptance of draft k given that all before it were accepted.
        recorded: domain -> blocks recorded on an engine; where present they are used instead of the joint model.
        confidence: joint model of the domains that are not recorded.
        calibration: what the server applies to the confidences, or None.
    """

    name: str
    source: str
    conditional: Mapping[str, tuple[float, ...]]
    recorded: Mapping[str, Blocks] = field(default_factory=dict)
    confidence: ConfidenceModel = ConfidenceModel()
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if not self.conditional:
            raise ConfigError(f"acceptance profile '{self.name}' has no domains")
        if len({len(values) for values in self.conditional.values()}) != 1 or self.draft_len < 1:
            raise ConfigError(f"acceptance profile '{self.name}': every domain needs the same positions, at least one")
        for domain, values in self.conditional.items():
            if not all(0 <= value <= 1 for value in values):
                raise ConfigError(f"acceptance profile '{self.name}', domain '{domain}': acceptance lies in [0, 1]")

    @property
    def draft_len(self) -> int:
        """gamma: positions it knows."""
        return len(next(iter(self.conditional.values())))

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains."""
        return tuple(self.conditional)

    def accepted_len(self, domain: str, draft_len: int | None = None) -> float:
        """Return tau of a domain when `draft_len` drafts are verified, bonus included."""
        return accepted_len(self.conditional[domain][:draft_len])

    def cut(self, draft_len: int) -> AcceptanceProfile:
        """Return the profile of the first `draft_len` positions.

        Raises:
            ConfigError: it does not know so many.
        """
        if not 1 <= draft_len <= self.draft_len:
            raise ConfigError(
                f"acceptance profile '{self.name}' knows {self.draft_len} positions, {draft_len} are asked for"
            )
        return AcceptanceProfile(
            self.name,
            self.source,
            {domain: values[:draft_len] for domain, values in self.conditional.items()},
            {
                domain: Blocks(
                    np.ascontiguousarray(b.confidence[:, :draft_len]), np.minimum(b.accepted, draft_len), b.starts
                )
                for domain, b in self.recorded.items()
            },
            self.confidence,
            self.calibration,
        )

    def blocks(self, domain: str, *, seed: int) -> Blocks:
        """Return blocks of a domain: the recorded ones, or drawn ones that depend on nothing but seed and domain."""
        if domain in self.recorded:
            return self.recorded[domain]
        generator = np.random.default_rng([seed, *domain.encode()])
        return draw_blocks(self.conditional[domain], self.confidence, POOL_SIZE, generator)


def accepted_len(conditional: Sequence[float]) -> float:
    """Return tau, bonus included, of conditional acceptances by position."""
    return 1 + float(np.cumprod(np.asarray(conditional, np.float64)).sum())


def level_of(goal: float, draft_len: int) -> float:
    """Return the acceptance that, alike at every position, gives an accepted length.

    Raises:
        ConfigError: no acceptance gives it.
    """
    if not 1 <= goal <= draft_len + 1:
        raise ConfigError(f"an accepted length of {goal} is impossible with {draft_len} drafts")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_len([middle] * draft_len) < goal else (low, middle)
    return (low + high) / 2


def write_acceptance(path: Path, profile: AcceptanceProfile) -> None:
    """Write a profile.

    Raises:
        DeviceError: the file cannot be written.
    """
    domains: dict[str, Any] = {}
    for domain, values in profile.conditional.items():
        domains[domain] = {"conditional": [round(value, 6) for value in values]}
        if domain in profile.recorded:
            blocks = profile.recorded[domain]
            rows = np.round(blocks.confidence.astype(np.float64), 5).tolist()
            domains[domain]["blocks"] = [
                [*row, count] for row, count in zip(rows, blocks.accepted.tolist(), strict=True)
            ]
            if blocks.starts is not None:
                domains[domain]["starts"] = list(blocks.starts)
    content = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "name": profile.name,
        "source": profile.source,
        "domains": domains,
        "confidence": {entry.name: getattr(profile.confidence, entry.name) for entry in fields(ConfidenceModel)},
    }
    if profile.calibration is not None:
        content["calibration"] = {
            "temperature": list(profile.calibration.temperature),
            "bias": list(profile.calibration.bias),
        }
    try:
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"{path} cannot be written ({error.strerror})") from error


def read_acceptance(path: Path) -> AcceptanceProfile:
    """Read a profile.

    Raises:
        UsageError: the file cannot be read or is no profile.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"acceptance profile {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"acceptance profile {path} is not valid JSON ({error})") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise UsageError(f"{path} is no acceptance profile; record one with trtllm-dspark bench --acceptance_output")
    if raw.get("schema_version") not in (1, SCHEMA_VERSION):
        raise UsageError(
            f"{path} has schema_version {raw.get('schema_version')!r}, this version reads 1 and {SCHEMA_VERSION}"
        )
    try:
        return _profile(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise UsageError(f"acceptance profile {path} is malformed ({error}); see docs/file_formats.md") from error


def _profile(raw: Mapping[str, Any]) -> AcceptanceProfile:
    known = {"schema", "schema_version", "name", "source", "domains", "confidence", "calibration"}
    if unknown := sorted(set(raw) - known):
        raise ValueError(f"unknown field '{unknown[0]}'")
    conditional, recorded = {}, {}
    for domain, entry in raw["domains"].items():
        if "blocks" in entry:
            rows = np.array(entry["blocks"], np.float64)
            recorded[domain] = Blocks(
                rows[:, :-1].astype(np.float32), rows[:, -1].astype(np.int64), _starts(entry, len(rows))
            )
        conditional[domain] = tuple(float(value) for value in entry["conditional"])
        if any(math.isnan(value) for value in conditional[domain]):
            raise ValueError(f"domain '{domain}' has an acceptance that is no number")
    calibration = raw.get("calibration")
    return AcceptanceProfile(
        str(raw["name"]),
        str(raw["source"]),
        conditional,
        recorded,
        ConfidenceModel(**raw.get("confidence", {})),
        None if calibration is None else Calibration(tuple(calibration["temperature"]), tuple(calibration["bias"])),
    )


def _starts(entry: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    if "starts" not in entry:
        return None
    starts = tuple(int(value) for value in entry["starts"])
    if not starts or starts[0] != 0 or starts[-1] >= count or any(b <= a for a, b in itertools.pairwise(starts)):
        raise ValueError("'starts' must ascend from 0 within the blocks")
    return starts


def from_recorded(
    name: str, source: str, recorded: Mapping[str, Blocks], calibration: Calibration | None = None
) -> AcceptanceProfile:
    """Return the profile of recorded blocks; a position that no block reached counts as never accepted."""
    conditional = {domain: tuple(np.nan_to_num(blocks.conditional()).tolist()) for domain, blocks in recorded.items()}
    return AcceptanceProfile(name, source, conditional, recorded, calibration=calibration)
