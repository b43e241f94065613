"""One decoding round on the device, from the anchors of the last round to those of the next, without the host.

begin -> block pass -> markov_draft -> caps -> confidence_schedule -> rows -> target pass -> (ban) -> ragged_accept ->
commit -> context pass. A round without drafts leaves out the block and the head; its schedule has nothing to choose.

All rows of a bucket run. Rows that are not live ride along: they verify nothing, their state does not move, and what
they write lies behind the end of their slot's caches, where the slot's next pass writes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine._packing import pack_rows
from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.rounds import PromptRows
from trtllm_dspark.engine.tensorrt._arrays import ACCEPTANCES, MAX_BANNED, RoundArrays, round_work
from trtllm_dspark.engine.tensorrt._buckets import RoundKey, block_shapes, context_shapes, target_shapes
from trtllm_dspark.engine.tensorrt._heads import DeviceHeads
from trtllm_dspark.engine.tensorrt._memory import PinnedRing
from trtllm_dspark.engine.tensorrt._model import Model
from trtllm_dspark.engine.tensorrt._staging import stage
from trtllm_dspark.engine.tensorrt.device import PlanContext
from trtllm_dspark.plugins import ELEMENT_TYPES


def table_len(limits: EngineLimits) -> int:
    """Return the entries of the step times a round may need."""
    return limits.max_batch_size * (limits.max_draft_len + 1) + 1


class DeviceRound:
    """Enqueues decoding rounds and the passes of prompts; a `RoundPasses`.

    Args:
        model: plans of the `trt_native` lowering.
        heads: the drafter's heads, or None without a drafter.

    Raises:
        ValueError: one of drafter and heads is there and the other is not.
    """

    def __init__(self, model: Model, heads: DeviceHeads | None) -> None:
        device, limits, own = model.device, model.limits, model.drafter
        if (own is None) != (heads is None):
            raise ValueError("a drafter and its heads come together")
        self._model, self._device, self._limits, self._heads = model, device, limits, heads
        self._drafter = None if own is None else own.config
        self._target, self._stream = model.target, model.stream
        self._context = None if own is None else own.context
        self._block = None if own is None else own.block
        work = round_work(limits, limits.draft_vocab_size)
        self.arrays = RoundArrays(device, limits, model.memory, work, table_len(limits))
        self._memory = self.arrays.memory
        self._gamma = max(1, limits.max_draft_len)
        self._workspace = device.allocate(self._workspace_bytes())

    @property
    def has_confidence(self) -> bool:
        """Whether rounds with drafts compute confidences."""
        return self._heads is not None and self._heads.has_confidence

    def contexts(self, key: RoundKey) -> list[PlanContext]:
        """Return contexts bound to a key's shapes: target, then the drafter's context and block where it has any."""
        made = [self._target.bound(self.target_shapes(key), self._stream)]
        if self._context is not None:
            shapes = context_shapes(key.num_requests, key.row_len, key.num_tokens, self._limits.feature_size)
            made.append(self._context.bound(shapes, self._stream))
        if self._block is not None and self._drafter is not None and key.draft_len:
            made.append(self._block.bound(block_shapes(key.num_requests, self._drafter.block_size), self._stream))
        return made

    def target_shapes(self, key: RoundKey) -> dict[str, tuple[int, ...]]:
        """Return the input shapes of a key's target pass: every row's logits are wanted."""
        return target_shapes(key.num_requests, key.row_len, key.num_tokens, key.num_tokens)

    def enqueue(self, key: RoundKey, contexts: Sequence[PlanContext]) -> None:
        """Enqueue one round; everything but the key is read on the device."""
        m = self._memory
        has_block = key.draft_len > 0 and self._drafter is not None
        self._device.launch(
            "round_begin",
            self._stream,
            num_requests=key.num_requests,
            block_size=self._drafter.block_size if has_block and self._drafter is not None else 0,
            mask_token=self._limits.mask_token_id,
            block_ids=m["block_ids"] if has_block else None,
            starts=m["write_indices"],
            anchors=m["anchors"],
            positions=m["positions"],
        )
        if has_block and self._heads is not None:
            contexts[2].enqueue(self._stream)
            self._draft(key, self._heads)
        self._schedule(key, has_block)
        self._device.launch(
            "round_rows",
            self._stream,
            num_requests=key.num_requests,
            num_tokens=key.num_tokens,
            row_len=key.row_len,
            input_ids=m["input_ids"],
            positions=m["token_positions"],
            pack_index=m["pack_index"],
            pad_index=m["pad_index"],
            **{name: m[name] for name in ("cu_tokens", "token_ids", "token_request", "token_position")},
        )
        contexts[0].enqueue(self._stream)
        self.accept(key.num_requests, key.num_tokens, key.acceptance, key.bans, drafted=has_block)
        if self._context is not None:
            contexts[1].enqueue(self._stream)

    def accept(
        self,
        num_requests: int,
        num_tokens: int,
        acceptance: int,
        bans: bool,
        *,
        drafted: bool,
        first_slot: int = 0,
        memory: dict[str, int] | None = None,
    ) -> None:
        """Enqueue acceptance and commit of rows whose logits are there.

        Args:
            num_requests: R.
            num_tokens: rows of logits.
            acceptance: code of the mode.
            bans: whether tokens are forbidden.
            drafted: whether `markov_draft` ran; else every row has its anchor only.
            first_slot: slot of row 0, whose state moves.
            memory: arrays that replace a round's own: a prompt's sampling parameters and results.
        """
        m = self._memory | (memory or {})
        state = {name: m[name] + 4 * first_slot for name in ("anchors", "positions", "remaining")}
        common = {"num_requests": num_requests, "cu_tokens": m["cu_tokens"], "positions": state["positions"]}
        if bans:
            self._device.launch(
                "round_ban",
                self._stream,
                num_tokens=num_tokens,
                vocab=self._limits.vocab_size,
                max_banned=MAX_BANNED,
                ban_until=m["ban_until"],
                banned=m["banned"],
                logits=m["logits"],
                **common,
            )
        heads = self._heads
        sampled = drafted and acceptance != ACCEPTANCES["greedy"]
        self._device.launch(
            "ragged_accept",
            self._stream,
            num_tokens=num_tokens,
            draft_len=self._gamma,
            vocab=self._limits.vocab_size,
            draft_vocab=self._limits.draft_vocab_size if drafted else self._limits.vocab_size,
            num_candidates=0,
            acceptance=acceptance,
            logits_type=ELEMENT_TYPES["float32"],
            logits_stride=self._limits.vocab_size,
            target_logits=m["logits"],
            draft_logits=m["draft_logits"] if sampled else None,
            candidates=None,
            draft_of_target=heads.draft_of_target if heads is not None and drafted else None,
            workspace=self._workspace,
            **{name: m[name] for name in ("draft_tokens", "draft_entries", "draft_laws", "draft_totals")},
            **{name: m[name] for name in ("temperature", "top_k", "top_p", "seed")},
            **{name: m[name] for name in ("out_tokens", "emitted_len", "status")},
            **common,
        )
        self._device.launch(
            "round_commit",
            self._stream,
            num_requests=num_requests,
            draft_len=self._gamma,
            **{name: m[name] for name in ("active", "out_tokens", "emitted_len")},
            **state,
        )

    def enqueue_prompts(
        self, prompts: PromptRows, acceptance: int, state: Mapping[int, NDArray[Any]], ring: PinnedRing
    ) -> None:
        """Enqueue a pass over prompt chunks, and the first token of those that end with it; see `RoundPasses`."""
        m, model, completed = self._memory, self._model, prompts.max_new_tokens.size
        packed = pack_rows(prompts.row_lens, prompts.write_indices)
        rows = np.zeros(max(1, completed), np.int64)
        rows[:completed] = (np.cumsum(prompts.row_lens) - 1)[:completed]
        arrays = {
            "input_ids": prompts.token_ids,
            "token_positions": packed.positions,
            "pack_index": packed.pack_index,
            "pad_index": packed.pad_index,
            "write_indices": prompts.write_indices,
            "logit_rows": rows,
        }
        stage(model, ring, {**{m[name]: array for name, array in arrays.items()}, **state})
        count, tokens = prompts.row_lens.size, prompts.token_ids.size
        self._target.enqueue(
            target_shapes(count, packed.width, tokens, rows.size),
            self._stream,
            first_slot=prompts.first_slot,
            memory={"logit_rows": m["logit_rows"]},
        )
        if self._context is not None:
            shapes = context_shapes(count, packed.width, tokens, self._limits.feature_size)
            self._context.enqueue(shapes, self._stream, first_slot=prompts.first_slot)
        if completed:
            # A round without drafts over each prompt's last row.
            memory = self.arrays.prompt_memory | {"cu_tokens": m["unit_rows"]}
            bans = bool(prompts.sampling.ban_until.any())
            self.accept(
                completed, completed, acceptance, bans, drafted=False, first_slot=prompts.first_slot, memory=memory
            )

    def _draft(self, key: RoundKey, heads: DeviceHeads) -> None:
        m = self._memory
        self._device.launch(
            "markov_draft",
            self._stream,
            num_requests=key.num_requests,
            draft_len=self._gamma,
            acceptance=key.acceptance,
            candidates=None,
            status=m["draft_status"],
            workspace=self._workspace,
            draft_logits=m["draft_logits"] if key.acceptance != ACCEPTANCES["greedy"] else None,
            **{name: m[name] for name in ("base_logits", "hidden", "anchors", "positions")},
            **{name: m[name] for name in ("temperature", "top_k", "top_p", "seed")},
            **{name: m[name] for name in ("draft_tokens", "draft_entries", "draft_laws", "draft_totals")},
            **heads.draft,
        )
        self._device.launch(
            "round_caps",
            self._stream,
            num_requests=key.num_requests,
            **{name: m[name] for name in ("active", "max_drafts", "remaining", "draft_status", "caps", "live")},
        )

    def _schedule(self, key: RoundKey, has_block: bool) -> None:
        m, heads = self._memory, self._heads
        confidence: dict[str, int | None] = {"hidden_weight": None, "markov_table": None, "confidence_bias": None}
        if has_block and heads is not None:
            confidence = heads.confidence
        self._device.launch(
            "confidence_schedule",
            self._stream,
            num_requests=key.num_requests,
            draft_len=self._gamma,
            hidden_size=0 if self._drafter is None else self._drafter.backbone.hidden_size,
            num_rows=key.num_requests * (self._gamma + 1),
            table_len=table_len(self._limits),
            mode=key.mode,
            hidden_type=ELEMENT_TYPES["float32"],
            hidden=m["hidden"] if has_block else None,
            workspace=self._workspace,
            **confidence,
            **{
                name: m[name]
                for name in ("inv_temperature", "position_bias", "limits", "thresholds", "terms", "step_time_us")
            },
            # Without a block nobody may draft, and the host says so.
            caps=m["caps"] if has_block else m["max_drafts"],
            live=m["live"] if has_block else None,
            **{name: m[name] for name in ("anchors", "positions", "draft_tokens")},
            **{name: m[name] for name in ("confidence", "survival", "verify_len", "report")},
            **{name: m[name] for name in ("cu_tokens", "token_ids", "token_request", "token_position")},
        )

    def _workspace_bytes(self) -> int:
        rows, limits = self._limits.max_batch_size, self._limits
        tokens = rows * (self._gamma + 1)
        needs = [
            self._device.workspace_bytes(
                "ragged_accept", **self._sizes("ragged_accept", num_tokens=tokens, vocab=limits.vocab_size)
            ),
            self._device.workspace_bytes("confidence_schedule", **self._sizes("confidence_schedule")),
        ]
        if self._heads is not None:
            sizes = {name: self._heads.draft[name] for name in ("vocab", "draft_vocab", "rank")}
            needs.append(self._device.workspace_bytes("markov_draft", **self._sizes("markov_draft", **sizes)))
        return max(needs)

    def _sizes(self, op: str, **known: int | None) -> dict[str, int | None]:
        return (
            self._device_scalars(op) | {"num_requests": self._limits.max_batch_size, "draft_len": self._gamma} | known
        )

    def _device_scalars(self, op: str) -> dict[str, int | None]:
        return dict.fromkeys(_SCALARS[op], 0)


_SCALARS = {
    "markov_draft": (
        "num_requests", "draft_len", "vocab", "draft_vocab", "rank", "hidden_size", "head_kind", "acceptance",
        "num_candidates", "logits_type", "weight_type", "hidden_type",
    ),
    "confidence_schedule": (
        "num_requests", "draft_len", "hidden_size", "num_rows", "table_len", "mode", "hidden_type",
    ),
    "ragged_accept": (
        "num_tokens", "num_requests", "draft_len", "vocab", "draft_vocab", "num_candidates", "acceptance",
        "logits_type", "logits_stride",
    ),
}  # fmt: skip
