"""Target and drafter as TensorRT plans on one GPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine._packing import PackedRows, pack_rows
from trtllm_dspark.engine.base import BlockOutput, ContextBatch, EngineLimits, IntArray, TargetOutput, TokenBatch
from trtllm_dspark.engine.tensorrt._arrays import MAX_BANNED
from trtllm_dspark.engine.tensorrt._buckets import block_shapes, context_shapes, target_shapes
from trtllm_dspark.engine.tensorrt._heads import DeviceHeads
from trtllm_dspark.engine.tensorrt._memory import PinnedRing
from trtllm_dspark.engine.tensorrt._model import Drafter, load_model
from trtllm_dspark.engine.tensorrt._round import DeviceRound
from trtllm_dspark.engine.tensorrt._rounds import RoundQueue
from trtllm_dspark.engine.tensorrt._runner import NUM_GRAPHS, RoundRunner
from trtllm_dspark.engine.tensorrt._staging import stage
from trtllm_dspark.engine.tensorrt.device import Device, Plan
from trtllm_dspark.errors import DeviceError

logger = logging.getLogger(__name__)


class TensorRtEngine(RoundRunner):
    """`Engine` and `RoundEngine` over plans of the `trt_native` lowering.

    Single passes (`verify`, `absorb`, `draft_block`) take and give host arrays and wait for the device: the core runs
    on the host between them. Rounds (`submit_round`, `collect_round`) stay on the device and need the kernel library.

    Args:
        device: runs everything; closed by `close`.
        plans: `target`, and with a drafter `drafter_context` and `drafter_block`.
        target: configuration the target was built with.
        drafter: the same for the drafter, or None.
        limits: shapes the engine was built for.
        heads: the core's heads, for the host; None without a drafter.
        head_tensors: content of `heads.safetensors`, for the device.
        num_graphs: CUDA graphs kept at most.
        cuda_graphs: False runs rounds launch by launch.

    Raises:
        EngineError: plans and configuration do not fit.
        DeviceError: the device has no room.
    """

    def __init__(
        self,
        device: Device,
        plans: Mapping[str, Plan],
        target: ModelConfig,
        drafter: DrafterConfig | None,
        limits: EngineLimits,
        *,
        heads: Any = None,
        head_tensors: Mapping[str, NDArray[Any]] | None = None,
        num_graphs: int = NUM_GRAPHS,
        cuda_graphs: bool = True,
    ) -> None:
        self._host_heads = heads
        self._model = model = load_model(device, plans, target, drafter, limits)
        self._uploads, self._downloads = PinnedRing(device, 2), PinnedRing(device, 2)
        rounds = None
        if device.has_kernels:
            on_device = None
            if drafter is not None:
                on_device = DeviceHeads(device, drafter, head_tensors or {}, target.vocab_size, model.stream)
            passes = DeviceRound(model, on_device)
            rounds = RoundQueue(model, passes, num_graphs=num_graphs, cuda_graphs=cuda_graphs)
        else:
            logger.info("no kernel library: passes run one at a time, drafts are chosen on the host")
        super().__init__(device, limits, model, rounds)

    @property
    def heads(self) -> Any:
        """Sequential and confidence heads of the host, or None without a drafter."""
        return self._host_heads

    @property
    def max_banned(self) -> int:
        """Most end tokens of a request that has a `min_tokens`."""
        return MAX_BANNED

    def verify(self, batch: TokenBatch) -> TargetOutput:
        """Run the target over packed rows and wait for it; see `Engine`."""
        self._check(batch.row_lens, batch.write_indices, batch.first_slot, batch.token_ids.size, min_len=1)
        model = self._model
        packed = pack_rows(batch.row_lens, batch.write_indices)
        # The plans want a row of logits even when nobody does.
        rows = batch.logit_rows if batch.logit_rows.size else np.zeros(1, np.int64)
        self._stage({"input_ids": batch.token_ids, "logit_rows": rows, "pack_index": packed.pack_index}, packed, batch)
        model.target.enqueue(
            target_shapes(batch.row_lens.size, packed.width, batch.token_ids.size, rows.size),
            model.stream,
            first_slot=batch.first_slot,
            memory={"logit_rows": model.memory["logit_rows"]},
        )
        logits = self._fetch("logits", (rows.size, self._limits.vocab_size))
        features = self._fetch("features", (batch.token_ids.size, self._limits.feature_size))
        return TargetOutput(logits[: batch.logit_rows.size], features)

    def absorb(self, batch: ContextBatch) -> None:
        """Append the drafter's context of committed tokens; see `Engine`."""
        drafter = self._drafter()
        tokens = int(batch.features.shape[0])
        if tokens == 0:
            return
        self._check(batch.row_lens, batch.write_indices, batch.first_slot, tokens, min_len=0)
        packed = pack_rows(batch.row_lens, batch.write_indices)
        self._stage({"features": np.ascontiguousarray(batch.features, np.float32)}, packed, batch)
        shapes = context_shapes(batch.row_lens.size, packed.width, tokens, self._limits.feature_size)
        drafter.context.enqueue(shapes, self._model.stream, first_slot=batch.first_slot)

    def draft_block(self, anchors: IntArray, positions: IntArray, *, first_slot: int = 0) -> BlockOutput:
        """Run the drafter's backbone over one block a row and wait for it; see `Engine`."""
        drafter, limits = self._drafter(), self._limits
        rows = anchors.size
        if first_slot < 0 or first_slot + rows > limits.max_batch_size or positions.size != rows:
            raise DeviceError(f"a block of {rows} rows from slot {first_slot} does not fit the engine's slots")
        ids = np.full((rows, drafter.config.block_size), limits.mask_token_id, np.int64)
        ids[:, 0] = anchors
        memory = self._model.memory
        stage(self._model, self._uploads, {memory["block_ids"]: ids, memory["write_indices"]: positions})
        shapes = block_shapes(rows, drafter.config.block_size)
        drafter.block.enqueue(shapes, self._model.stream, first_slot=first_slot)
        gamma = limits.max_draft_len
        base_logits = self._fetch("base_logits", (rows, gamma, limits.draft_vocab_size))
        return BlockOutput(base_logits, self._fetch("hidden", (rows, gamma, drafter.config.backbone.hidden_size)))

    def _drafter(self) -> Drafter:
        if self._closed or self._model.drafter is None:
            raise DeviceError("the engine has no drafter or is closed; build one with --draft_checkpoint")
        return self._model.drafter

    def _stage(self, arrays: Mapping[str, NDArray[Any]], packed: PackedRows, batch: TokenBatch | ContextBatch) -> None:
        """Enqueue the copies of a pass's inputs."""
        memory = self._model.memory
        inputs = {memory[name]: array for name, array in arrays.items()}
        inputs[memory["token_positions"]] = packed.positions
        inputs[memory["pad_index"]] = packed.pad_index
        inputs[memory["write_indices"]] = batch.write_indices
        stage(self._model, self._uploads, inputs)

    def _fetch(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return a result of the last pass."""
        size = 4 * int(np.prod(shape, dtype=np.int64))
        if size == 0:
            return np.empty(shape, np.float32)
        piece = self._downloads.take(size)
        self._device.to_host(piece.memory[:size], self._model.memory[name], self._model.stream)
        self._downloads.give(piece, self._model.stream)
        self._downloads.wait(piece)
        return piece.memory[:size].view(np.float32).reshape(shape).copy()

    def _check(self, row_lens: IntArray, starts: IntArray, first_slot: int, num_tokens: int, *, min_len: int) -> None:
        """Refuse a pass that would write outside the caches."""
        limits, num_rows = self._limits, row_lens.size
        if self._closed:
            raise DeviceError("the engine is closed; load it again")
        if num_rows == 0 or num_rows != starts.size or int(row_lens.sum()) != num_tokens or row_lens.min() < min_len:
            raise DeviceError(f"the rows of a pass do not add up: {num_rows} rows, {num_tokens} tokens")
        if first_slot < 0 or first_slot + num_rows > limits.max_batch_size or num_tokens > limits.max_num_tokens:
            raise DeviceError(
                f"a pass of {num_rows} rows from slot {first_slot} and {num_tokens} tokens exceeds the engine's "
                f"{limits.max_batch_size} slots or {limits.max_num_tokens} tokens; build it with larger limits"
            )
        if int(starts.min()) < 0 or int((starts + row_lens).max()) > limits.max_seq_len:
            raise DeviceError(f"a row of a pass ends beyond the engine's {limits.max_seq_len} tokens")
