"""Whole rounds of engines that keep anchors, positions and caches on their device.

Such an engine takes round n + 1 before it gives back round n: the host describes what it knows (who decodes, how they
sample, which prompts come in, what schedule to follow), and learns one round late which tokens came of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.base import EngineLimits, FloatArray, IntArray

Ticket = int
"""Number of a submitted round."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each row chooses its tokens.

    Attributes:
        temperature: [R] float32, 0 = greedy.
        top_k: [R] int64, 0 = off.
        top_p: [R] float32, 1 = off.
        seed: [R] uint64 keys of the random streams.
        ban_until: [R] int64; tokens at positions below it cannot be the banned ones; 0 = nothing is banned.
        banned: for each row the ids, empty where nothing is banned.
    """

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    seed: NDArray[np.uint64]
    ban_until: IntArray
    banned: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DeviceSchedule:
    """What decides on the device how many drafts are verified; nothing in it knows this round's confidences.

    Attributes:
        mode: as `SpeculationConfig.mode`.
        draft_len: drafts verified in mode `fixed`.
        threshold: survival a draft needs in mode `threshold`, one number or [R] float32; above 1 = no draft.
        budget: drafts over all rows in mode `stale_topk`.
        token_budget: drafts over all rows that fit into the round.
        step_time_us: [B + 1] microseconds of a pass over B tokens, for mode `early_stop`, or None.
        fixed_time_us: microseconds of a round that verifies nothing.
        load_scale: factor of the step times.
        temperature: [gamma] of the confidence head, or None = 1.
        bias: [gamma] of the confidence head, or None = 0.
    """

    mode: Literal["fixed", "threshold", "early_stop", "stale_topk"]
    draft_len: int
    threshold: float | FloatArray
    budget: int
    token_budget: int
    step_time_us: FloatArray | None = None
    fixed_time_us: float = 0.0
    load_scale: float = 1.0
    temperature: FloatArray | None = None
    bias: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decoding requests in slots 0 .. R - 1.

    Attributes:
        max_drafts: [R] most drafts each may have verified; 0 = none. The device lowers it where fewer tokens remain.
        sampling: of the R rows.
        schedule: None = a round without drafts.
    """

    max_drafts: IntArray
    sampling: RowSampling
    schedule: DeviceSchedule | None


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Prompt chunks in consecutive slots, packed as in `TokenBatch`.

    Attributes:
        token_ids: [T] int64.
        row_lens: [R] int64, each at least 1.
        write_indices: [R] int64, tokens cached before the chunk.
        first_slot: slot of row 0.
        max_new_tokens: [L] tokens that each of the first L rows may emit: their prompts end with this chunk.
        sampling: of those L rows.
    """

    token_ids: IntArray
    row_lens: IntArray
    write_indices: IntArray
    first_slot: int
    max_new_tokens: IntArray
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class RoundBatch:
    """One round: decoding rows, prompt chunks, or both; a prompt's first token is decided in its round."""

    decode: DecodeRows | None
    prompts: PromptRows | None
    acceptance: Literal["rejection", "coupled"]


@dataclass(frozen=True, slots=True)
class RowResults:
    """What came of rows.

    Attributes:
        tokens: [R, n] int64; row r holds emitted_len[r] tokens.
        emitted_len: [R] int64, 0 where the status is not 0 or the row had no tokens left.
        status: [R] int64, the core's row status.
    """

    tokens: IntArray
    emitted_len: IntArray
    status: IntArray


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came of a round.

    Attributes:
        decode: of the decoding rows, or None.
        verify_len: [R] drafts verified of each decoding row.
        draft_failed: [R] whether the core refused a row's draft.
        confidence: [R, gamma] float32, or None where no confidence was computed.
        prompts: of the rows whose prompt ended, or None.
        device_us: microseconds between the round's begin and end on the device.
    """

    decode: RowResults | None
    verify_len: IntArray | None
    draft_failed: NDArray[np.bool_] | None
    confidence: FloatArray | None
    prompts: RowResults | None
    device_us: float


class RoundEngine(Protocol):
    """An engine that runs whole rounds.

    Slots as in `Engine`. A slot's state on the device: its caches, its anchor, and the tokens it may still emit.
    """

    @property
    def limits(self) -> EngineLimits:
        """Shapes the engine was built for."""
        ...

    @property
    def heads(self) -> Any:
        """Sequential and confidence heads, or None without a drafter."""
        ...

    @property
    def rounds_in_flight(self) -> int:
        """Rounds that may be submitted and not collected."""
        ...

    @property
    def max_banned(self) -> int:
        """Most ids of a row of `RowSampling.banned`."""
        ...

    def submit_round(self, batch: RoundBatch) -> Ticket:
        """Enqueue a round behind those submitted before; returns without waiting for the device.

        Raises:
            DeviceError: it does not fit the engine, or the device failed.
        """
        ...

    def collect_round(self, ticket: Ticket) -> RoundResult:
        """Wait for the oldest submitted round and return it.

        Raises:
            DeviceError: the device failed.
        """
        ...

    def copy_slot(self, source: int, destination: int, *, num_tokens: int, num_context: int) -> None:
        """Move a slot's caches and state behind the submitted rounds; counts are upper bounds of what is cached."""
        ...

    def close(self) -> None:
        """Wait for the device and release everything; calling it twice is harmless."""
        ...


@runtime_checkable
class CompiledRounds(Protocol):
    """A `RoundEngine` whose rounds were compiled for one schedule and one acceptance, and which runs nothing else."""

    @property
    def greedy_only(self) -> bool:
        """Whether requests must be greedy."""
        ...

    def check_session(self, mode: str, acceptance: str) -> None:
        """Refuse sessions whose rounds were not compiled.

        Args:
            mode: of their speculation.
            acceptance: of their sampled requests.

        Raises:
            ConfigError: the engine was built for others.
        """
        ...
