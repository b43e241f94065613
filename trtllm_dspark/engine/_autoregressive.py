"""An autoregressive drafter on ONNX Runtime: two sessions over one cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.engine._cache import KvCache
from trtllm_dspark.engine._packing import pack_rows
from trtllm_dspark.engine._session import CachedSession
from trtllm_dspark.engine.base import EngineLimits, FloatArray, IntArray, PairBatch, StepOutput
from trtllm_dspark.errors import DeviceError
from trtllm_dspark.graph import CONTEXT_GRAPH, STEP_GRAPH


class OnnxRuntimeDraftHead:
    """`DraftHead` on ONNX Runtime; see `engine.base` for the meaning of each pass.

    Args:
        directory: holds the graphs that `graph.write_autoregressive` wrote.
        config: the drafter.
        limits: shapes the engine is used with.
        num_threads: CPU threads of a pass.

    Raises:
        EngineError: a graph cannot be loaded.
        DeviceError: there is no memory for the cache.
    """

    def __init__(self, directory: Path, config: DrafterConfig, limits: EngineLimits, *, num_threads: int) -> None:
        model = config.backbone
        self._limits, self._hidden_size = limits, model.hidden_size
        # One query head a KV head would give a one-row product its own arithmetic path.
        self._min_width = 2 if model.num_heads == model.num_kv_heads else 1
        length = limits.max_seq_len + max(limits.max_num_tokens, config.block_size + self._min_width)
        self.cache = KvCache(1, limits.max_batch_size, model.num_kv_heads, model.head_dim, length)
        self._context = CachedSession(directory / CONTEXT_GRAPH, self.cache, num_threads=num_threads)
        self._step = CachedSession(directory / STEP_GRAPH, self.cache, num_threads=num_threads)

    def absorb(self, batch: PairBatch) -> FloatArray:
        """Append K/V of pairs of committed features and tokens; return [T, d] what stands for each feature.

        Raises:
            DeviceError: the pass does not fit the engine, or ONNX Runtime fails.
        """
        tokens, limits = int(batch.token_ids.size), self._limits
        ends = batch.write_indices + batch.row_lens
        if not 0 < tokens <= limits.max_num_tokens or int(batch.row_lens.sum()) != tokens:
            raise DeviceError(f"a pass of {tokens} pairs does not fit the engine's {limits.max_num_tokens} tokens")
        if tokens != len(batch.features) or int(ends.max()) > limits.max_seq_len:
            raise DeviceError(f"pairs of a pass do not add up, or end beyond the engine's {limits.max_seq_len} tokens")
        self._check_slots(batch.first_slot, batch.row_lens.size)
        packed = pack_rows(batch.row_lens, batch.write_indices)
        state = np.empty((tokens, self._hidden_size), np.float32)
        self._context.run(
            batch.first_slot,
            batch.row_lens.size,
            {
                "features": np.ascontiguousarray(batch.features, np.float32),
                "input_ids": np.ascontiguousarray(batch.token_ids, np.int64),
                "positions": packed.positions,
                "pad_index": packed.pad_index,
                "write_indices": np.ascontiguousarray(batch.write_indices, np.int64),
            },
            {"state": state},
        )
        return state

    def step(self, state: FloatArray, token_ids: IntArray, rows: IntArray, *, first_slot: int = 0) -> StepOutput:
        """Run the head over one pair a request.

        Raises:
            DeviceError: the pass does not fit the engine, or ONNX Runtime fails.
        """
        count = int(token_ids.size)
        self._check_slots(first_slot, count)
        if int(rows.max()) + self._min_width > self.cache.length:
            raise DeviceError(f"a draft at row {int(rows.max())} lies behind the drafter's cache")
        packed = pack_rows(np.ones(count, np.int64), rows, min_width=self._min_width)
        logits = np.empty((count, self._limits.draft_vocab_size), np.float32)
        hidden = np.empty((count, self._hidden_size), np.float32)
        self._step.run(
            first_slot,
            count,
            {
                "state": np.ascontiguousarray(state, np.float32),
                "input_ids": np.ascontiguousarray(token_ids, np.int64),
                "positions": packed.positions,
                "pad_index": packed.pad_index,
                "pack_index": packed.pack_index,
                "write_indices": np.ascontiguousarray(rows, np.int64),
            },
            {"logits": logits, "hidden": hidden},
        )
        return StepOutput(logits, hidden)

    def close(self) -> None:
        """Release the sessions."""
        self._context.close()
        self._step.close()

    def _check_slots(self, first_slot: int, count: int) -> None:
        if first_slot < 0 or count < 1 or first_slot + count > self._limits.max_batch_size:
            raise DeviceError(f"a pass of {count} rows from slot {first_slot} does not fit the engine's slots")
