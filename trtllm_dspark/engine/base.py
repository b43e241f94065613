"""The passes a round is made of, as one small interface that every backend implements.

A backend owns device memory: weights, the target's KV cache and the drafter's. It knows slots, not requests: slot i is
row i of every cache, and a pass covers the contiguous slots `[first_slot, first_slot + R)`, so a runtime keeps its
active slots compact and idle ones cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine was built for; every pass must stay inside.

    `autoregressive`: its drafter drafts token after token (`AutoregressiveEngine`), no blocks.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int
    vocab_size: int
    draft_vocab_size: int
    feature_size: int
    mask_token_id: int
    has_drafter: bool
    autoregressive: bool = False


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed ragged rows of tokens for one target pass.

    Attributes:
        token_ids: [T] int64.
        row_lens: [R] int64, tokens of each row, each >= 1; T is their sum.
        write_indices: [R] int64, tokens already in each row's cache; row r's tokens take the positions
            write_indices[r] .. write_indices[r] + row_lens[r] - 1.
        logit_rows: [L] int64, indices into the T packed tokens whose logits are wanted.
        first_slot: slot of row 0; row r lives in slot first_slot + r.
    """

    token_ids: IntArray
    row_lens: IntArray
    write_indices: IntArray
    logit_rows: IntArray
    first_slot: int = 0


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Result of one target pass.

    Attributes:
        logits: [L, V] float32, rows in the order of `logit_rows`.
        features: [T, m * d] float32, outputs of the drafter's target layers, concatenated; width 0 without a drafter.
    """

    logits: FloatArray
    features: FloatArray


@dataclass(frozen=True, slots=True)
class ContextBatch:
    """Target features of committed tokens for the drafter's context, packed like `TokenBatch`.

    Attributes:
        features: [Tc, m * d] float32.
        row_lens: [R] int64, rows may be 0.
        write_indices: [R] int64, tokens already in the drafter's context of each row.
        first_slot: slot of row 0.
    """

    features: FloatArray
    row_lens: IntArray
    write_indices: IntArray
    first_slot: int = 0


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """Result of one drafter block pass.

    Attributes:
        base_logits: [R, gamma, Vd] float32; slot j predicts draft token j + 1 (anchor-first block).
        hidden: [R, gamma, d] float32 after the final norm: what the LM head and the confidence head read.
    """

    base_logits: FloatArray
    hidden: FloatArray


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Target features of committed tokens, each with the token behind it, for an autoregressive drafter.

    Attributes:
        features: [T, m * d] float32.
        token_ids: [T] int64, the token behind each feature's own.
        row_lens: [R] int64, rows may be 0.
        write_indices: [R] int64, pairs already in the drafter's cache of each row: row j of it belongs to feature j.
        first_slot: slot of row 0.
    """

    features: FloatArray
    token_ids: IntArray
    row_lens: IntArray
    write_indices: IntArray
    first_slot: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one draft step.

    Attributes:
        logits: [R, Vd] float32, of the token behind the one that was given.
        state: [R, d] float32, what stands for the feature in the next step.
    """

    logits: FloatArray
    state: FloatArray


class DraftHead(Protocol):
    """Passes of an autoregressive drafter over its own slot cache."""

    def absorb(self, batch: PairBatch) -> FloatArray:
        """Append the cache rows of committed pairs; returns [T, d], the state that stands for each feature."""
        ...

    def step(self, state: FloatArray, token_ids: IntArray, rows: IntArray, *, first_slot: int = 0) -> StepOutput:
        """Draft one token a request, writing one cache row each.

        Args:
            state: [R, d] of the feature or draft before.
            token_ids: [R] int64, the token behind it.
            rows: [R] int64, place of the pair in the drafter's cache; what lies behind it is not read.
            first_slot: slot of row 0.
        """
        ...


class Engine(Protocol):
    """Target and drafter passes over a slot KV cache."""

    @property
    def limits(self) -> EngineLimits:
        """Shapes the engine was built for."""
        ...

    @property
    def heads(self) -> Any:
        """Sequential and confidence head weights as `trtllm_dspark._core.DraftHeads`, or None without a drafter."""
        ...

    def verify(self, batch: TokenBatch) -> TargetOutput:
        """Run the target over packed rows, appending their K/V in place."""
        ...

    def absorb(self, batch: ContextBatch) -> None:
        """Append the drafter's context K/V of committed tokens (no block, no head)."""
        ...

    def draft_block(self, anchors: IntArray, positions: IntArray, *, first_slot: int = 0) -> BlockOutput:
        """Run the drafter's backbone over one block a row.

        Args:
            anchors: [R] int64, last token emitted of each request, not yet in the target's cache.
            positions: [R] int64, the anchor's position = length of the drafter's context of that row.
            first_slot: slot of row 0.
        """
        ...

    def copy_slot(self, source: int, destination: int, *, num_tokens: int, num_context: int) -> None:
        """Copy the first `num_tokens` cached tokens (`num_context` of the drafter's context) to another slot."""
        ...

    def close(self) -> None:
        """Release sessions and device memory; calling it twice is harmless."""
        ...


@runtime_checkable
class AutoregressiveEngine(Engine, Protocol):
    """An engine that may have an autoregressive drafter; its `absorb` and `draft_block` then refuse."""

    @property
    def draft_head(self) -> DraftHead:
        """Its autoregressive drafter.

        Raises:
            DeviceError: it has none.
        """
        ...
