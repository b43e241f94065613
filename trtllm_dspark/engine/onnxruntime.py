"""Target and drafter on ONNX Runtime's CPU provider."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine._autoregressive import OnnxRuntimeDraftHead
from trtllm_dspark.engine._cache import KvCache
from trtllm_dspark.engine._packing import pack_rows
from trtllm_dspark.engine._session import CachedSession
from trtllm_dspark.engine.base import (
    BlockOutput,
    ContextBatch,
    EngineLimits,
    IntArray,
    TargetOutput,
    TokenBatch,
)
from trtllm_dspark.errors import DeviceError
from trtllm_dspark.graph import BLOCK_GRAPH, CONTEXT_GRAPH, TARGET_GRAPH

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Drafter:
    """The drafter's two sessions over one cache."""

    config: DrafterConfig
    cache: KvCache
    context: CachedSession
    block: CachedSession


class OnnxRuntimeEngine:
    """`Engine` on ONNX Runtime; see `engine.base` for the meaning of each pass.

    Passes are synchronous. Logits of a token do not depend on how many rows or tokens share its pass.
    """

    def __init__(
        self,
        directory: Path,
        target: ModelConfig,
        drafter: DrafterConfig | None,
        limits: EngineLimits,
        heads: Any = None,
        *,
        num_threads: int = 2,
    ) -> None:
        """Load the graphs that `graph.write_target` and `graph.write_drafter` wrote into `directory`.

        Args:
            directory: holds the graphs and their data files.
            target: configuration the target was written with.
            drafter: the same for the drafter, or None.
            limits: shapes the engine is used with.
            heads: sequential and confidence heads, passed through.
            num_threads: CPU threads of a pass; a network uses at most as many as it has KV heads.

        Raises:
            EngineError: a graph cannot be loaded.
        """
        self._limits = limits
        self._heads = heads
        self._vocab = target.vocab_size
        # One query head a KV head would give a one-row product its own arithmetic path.
        self._min_width = 2 if target.num_heads == target.num_kv_heads else 1
        length = limits.max_seq_len + max(limits.max_num_tokens, self._min_width)
        self._cache = _make_cache(target, limits, length)
        threads = _threads(num_threads, target, "target")
        session = CachedSession(directory / TARGET_GRAPH, self._cache, num_threads=threads)
        self._target: CachedSession | None = session
        self._drafter: _Drafter | None = None
        self._draft_head: OnnxRuntimeDraftHead | None = None
        if drafter is not None and drafter.autoregressive:
            threads = _threads(num_threads, drafter.backbone, "drafter")
            self._draft_head = OnnxRuntimeDraftHead(directory, drafter, limits, num_threads=threads)
        elif drafter is not None:
            length = limits.max_seq_len + max(limits.max_num_tokens, drafter.block_size)
            cache = _make_cache(drafter.backbone, limits, length)
            threads = _threads(num_threads, drafter.backbone, "drafter")
            context = CachedSession(directory / CONTEXT_GRAPH, cache, num_threads=threads)
            block = CachedSession(directory / BLOCK_GRAPH, cache, num_threads=threads)
            self._drafter = _Drafter(drafter, cache, context, block)

    @property
    def limits(self) -> EngineLimits:
        """Shapes the engine was built for."""
        return self._limits

    @property
    def heads(self) -> Any:
        """Sequential and confidence heads as `trtllm_dspark._core.DraftHeads`, or None without a drafter."""
        return self._heads

    def verify(self, batch: TokenBatch) -> TargetOutput:
        """Run the target over packed rows, appending their K/V in place.

        Raises:
            DeviceError: the pass does not fit the engine, or ONNX Runtime fails.
        """
        session = self._target
        if session is None:
            raise DeviceError("the engine is closed; load it again")
        tokens = int(batch.token_ids.size)
        self._check(batch.row_lens, batch.write_indices, batch.first_slot, tokens, min_len=1)
        packed = pack_rows(batch.row_lens, batch.write_indices, min_width=self._min_width)
        logits = np.empty((batch.logit_rows.size, self._vocab), np.float32)
        features = np.empty((tokens, self._limits.feature_size), np.float32)
        session.run(
            batch.first_slot,
            batch.row_lens.size,
            {
                "input_ids": _ids(batch.token_ids),
                "positions": packed.positions,
                "pad_index": packed.pad_index,
                "pack_index": packed.pack_index,
                "write_indices": _ids(batch.write_indices),
                "logit_rows": _ids(batch.logit_rows),
            },
            {"logits": logits, "features": features} if self._limits.feature_size else {"logits": logits},
        )
        return TargetOutput(logits, features)

    def absorb(self, batch: ContextBatch) -> None:
        """Append the drafter's context K/V of committed tokens.

        Raises:
            DeviceError: the pass does not fit the engine, there is no drafter, or ONNX Runtime fails.
        """
        drafter = self._require_drafter()
        tokens = int(batch.features.shape[0])
        if tokens == 0:
            return
        self._check(batch.row_lens, batch.write_indices, batch.first_slot, tokens, min_len=0)
        packed = pack_rows(batch.row_lens, batch.write_indices)
        drafter.context.run(
            batch.first_slot,
            batch.row_lens.size,
            {
                "features": np.ascontiguousarray(batch.features, np.float32),
                "positions": packed.positions,
                "pad_index": packed.pad_index,
                "write_indices": _ids(batch.write_indices),
            },
            {},
        )

    def draft_block(self, anchors: IntArray, positions: IntArray, *, first_slot: int = 0) -> BlockOutput:
        """Run the drafter's backbone over one block a row.

        Args:
            anchors: [R] last token emitted of each request.
            positions: [R] the anchor's position = length of the drafter's context of that row.
            first_slot: slot of row 0.

        Raises:
            DeviceError: the pass does not fit the engine, there is no drafter, or ONNX Runtime fails.
        """
        drafter = self._require_drafter()
        num_rows, gamma = anchors.size, drafter.config.block_size
        if first_slot < 0 or first_slot + num_rows > self._limits.max_batch_size or positions.size != num_rows:
            raise DeviceError(f"a block of {num_rows} rows from slot {first_slot} does not fit the engine's slots")
        ids = np.full((num_rows, gamma), drafter.config.mask_token_id, np.int64)
        ids[:, 0] = anchors
        slots = self._limits.max_draft_len
        base_logits = np.empty((num_rows, slots, self._limits.draft_vocab_size), np.float32)
        hidden = np.empty((num_rows, slots, drafter.config.backbone.hidden_size), np.float32)
        drafter.block.run(
            first_slot,
            num_rows,
            {"input_ids": ids, "write_indices": _ids(positions)},
            {"base_logits": base_logits, "hidden": hidden},
        )
        return BlockOutput(base_logits, hidden)

    def copy_slot(self, source: int, destination: int, *, num_tokens: int, num_context: int) -> None:
        """Copy the first `num_tokens` cached tokens (`num_context` of the drafter's context) to another slot."""
        self._cache.copy_slot(source, destination, num_tokens)
        drafter = self._drafter or self._draft_head
        if drafter is not None:
            drafter.cache.copy_slot(source, destination, num_context)

    def close(self) -> None:
        """Release sessions and caches; calling it twice is harmless."""
        if self._target is not None:
            self._target.close()
            self._target = None
        if self._drafter is not None:
            self._drafter.context.close()
            self._drafter.block.close()
            self._drafter = None
        if self._draft_head is not None:
            self._draft_head.close()
            self._draft_head = None

    @property
    def draft_head(self) -> OnnxRuntimeDraftHead:
        """The autoregressive drafter.

        Raises:
            DeviceError: there is none, or the engine is closed.
        """
        if self._draft_head is None:
            raise DeviceError("the engine has no autoregressive drafter or is closed")
        return self._draft_head

    def _require_drafter(self) -> _Drafter:
        if self._drafter is None:
            raise DeviceError("the engine has no block drafter or is closed; build one with --draft_checkpoint")
        return self._drafter

    def _check(self, row_lens: IntArray, starts: IntArray, first_slot: int, num_tokens: int, *, min_len: int) -> None:
        """Refuse a pass that would write outside the caches."""
        limits, num_rows = self._limits, row_lens.size
        if (
            num_rows != starts.size
            or num_rows == 0
            or int(row_lens.sum()) != num_tokens
            or int(row_lens.min()) < min_len
        ):
            raise DeviceError(f"the rows of a pass do not add up: {num_rows} rows, {num_tokens} tokens")
        if first_slot < 0 or first_slot + num_rows > limits.max_batch_size or num_tokens > limits.max_num_tokens:
            raise DeviceError(
                f"a pass of {num_rows} rows from slot {first_slot} and {num_tokens} tokens exceeds the engine's "
                f"{limits.max_batch_size} slots or {limits.max_num_tokens} tokens; build it with larger limits"
            )
        if int(starts.min()) < 0 or int((starts + row_lens).max()) > limits.max_seq_len:
            raise DeviceError(f"a row of a pass ends beyond the engine's {limits.max_seq_len} tokens")


def _threads(wanted: int, config: ModelConfig, what: str) -> int:
    """Bound the threads so that none shares a head's product of probabilities and values with another.

    ONNX Runtime splits a product's columns among threads when it has more threads than products, and then sums over the
    context in blocks of another size: bits would depend on how many rows share a pass.
    """
    if wanted > config.num_kv_heads:
        logger.warning(
            "the %s runs on %d instead of %d threads: one a KV head keeps its results independent of the batch",
            what,
            config.num_kv_heads,
            wanted,
        )
    return min(wanted, config.num_kv_heads)


def _make_cache(config: ModelConfig, limits: EngineLimits, length: int) -> KvCache:
    return KvCache(config.num_layers, limits.max_batch_size, config.num_kv_heads, config.head_dim, length)


def _ids(values: IntArray) -> IntArray:
    return np.ascontiguousarray(values, np.int64)
