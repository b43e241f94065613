"""One decoding round over plans with plugins: two enqueues and two small kernels.

caps -> draft plan (block, chain, confidences, schedule, packing) -> verify plan (target, acceptance, the drafter's
context) -> commit. The draft plan's packed rows are the verify plan's rows as they lie; a round without drafts verifies
the slots' anchors at their positions, straight from the state.

Rows that are not live ride along as in `_round.py`: they verify nothing, their state does not move, and what they write
lies behind the end of their slot's caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine.rounds import PromptRows
from trtllm_dspark.engine.tensorrt._buckets import RoundKey
from trtllm_dspark.engine.tensorrt._memory import PinnedRing
from trtllm_dspark.engine.tensorrt._network import Network
from trtllm_dspark.engine.tensorrt._plugin_model import PluginModel
from trtllm_dspark.engine.tensorrt._staging import stage
from trtllm_dspark.engine.tensorrt.device import PlanContext, Shape

_PER_REQUEST = ("anchors", "positions", "temperature", "top_k", "top_p", "seed", "caps", "live", "thresholds")
_DRAFTED = ("draft_tokens", "draft_entries", "draft_laws", "draft_totals", "draft_logits", "candidates")


class PluginRound:
    """Enqueues decoding rounds and the passes of prompts; a `RoundPasses`.

    Args:
        model: plans of the `trt_plugin` lowering.
    """

    def __init__(self, model: PluginModel) -> None:
        self._model, self._device, self._stream = model, model.device, model.stream
        self.arrays = model.arrays
        self._memory = model.arrays.memory
        self._gamma = max(1, model.limits.max_draft_len)

    @property
    def has_confidence(self) -> bool:
        """Whether rounds with drafts compute confidences."""
        return self._model.has_confidence

    def contexts(self, key: RoundKey) -> list[PlanContext]:
        """Return contexts bound to a key's shapes: verify, and draft where there are drafts."""
        model, m, rows = self._model, self._memory, key.num_requests
        if not key.draft_len or model.draft is None:
            state = {"input_ids": m["anchors"], "token_position": m["positions"], "token_request": m["identity"]}
            state |= dict.fromkeys(("cu_tokens", "cu_logits"), m["unit_rows"])
            shapes = verify_shapes(model.target, rows, rows, rows)
            return [model.target.bound(shapes, self._stream, memory=state)]
        shapes = verify_shapes(model.target, rows, key.num_tokens, key.num_tokens)
        return [
            model.target.bound(shapes, self._stream),
            model.draft.bound(draft_shapes(model.draft, rows), self._stream),
        ]

    def enqueue(self, key: RoundKey, contexts: Sequence[PlanContext]) -> None:
        """Enqueue one round; everything but the key is read on the device."""
        m = self._memory
        if key.draft_len and self._model.draft is not None:
            self._device.launch(
                "round_caps",
                self._stream,
                num_requests=key.num_requests,
                # The plan takes away the caps of drafts that fail.
                draft_status=m["no_failures"],
                **{name: m[name] for name in ("active", "max_drafts", "remaining", "caps", "live")},
            )
            contexts[1].enqueue(self._stream)
        else:
            self._device.clear(m["verify_len"], 4 * key.num_requests, self._stream)
        contexts[0].enqueue(self._stream)
        self._commit(key.num_requests, m, 0)

    def enqueue_prompts(
        self, prompts: PromptRows, acceptance: int, state: Mapping[int, NDArray[Any]], ring: PinnedRing
    ) -> None:
        """Enqueue a pass over prompt chunks; it chooses the first token of those that end. See `RoundPasses`."""
        m, model, count = self._memory, self._model, prompts.row_lens.size
        lens, starts = prompts.row_lens, prompts.write_indices
        ends = np.cumsum(lens)
        rows = np.repeat(np.arange(count), lens)
        offsets = np.arange(prompts.token_ids.size) - (ends - lens)[rows]
        slots = prompts.first_slot + np.arange(count)
        arrays = {
            "prompt_ids": prompts.token_ids,
            "prompt_request": rows,
            "prompt_position": starts[rows] + offsets,
            "prompt_rows": np.concatenate([[0], ends]),
            "prompt_logit_rows": ends - 1,
            "prompt_pages": slots,
            "prompt_positions": starts + lens - 1,
        }
        stage(model, ring, {**{m[name]: np.asarray(value, np.int32) for name, value in arrays.items()}, **state})
        sampled = self.arrays.prompt_memory
        bound = {
            "input_ids": m["prompt_ids"],
            "token_request": m["prompt_request"],
            "token_position": m["prompt_position"],
            "cu_tokens": m["prompt_rows"],
            "logit_rows": m["prompt_logit_rows"],
            "cu_logits": m["unit_rows"],
            "page_table": m["prompt_pages"],
            "positions": m["prompt_positions"],
            **{name: sampled[name] for name in ("temperature", "top_k", "top_p", "seed")},
            **{name: sampled[name] for name in ("out_tokens", "emitted_len", "status")},
        }
        shapes = verify_shapes(model.target, count, prompts.token_ids.size, count)
        model.target.enqueue(shapes, self._stream, memory=bound)
        if prompts.max_new_tokens.size:
            self._commit(prompts.max_new_tokens.size, sampled, prompts.first_slot)

    def _commit(self, num_requests: int, memory: Mapping[str, int], first_slot: int) -> None:
        self._device.launch(
            "round_commit",
            self._stream,
            num_requests=num_requests,
            draft_len=self._gamma,
            **{name: memory[name] for name in ("active", "out_tokens", "emitted_len")},
            **{name: memory[name] + 4 * first_slot for name in ("anchors", "positions", "remaining")},
        )


def verify_shapes(network: Network, num_requests: int, num_tokens: int, num_logits: int) -> dict[str, Shape]:
    """Return the input shapes of a verify pass, caches left out."""
    shapes: dict[str, Shape] = dict.fromkeys(("input_ids", "token_request", "token_position"), (num_tokens,))
    shapes |= {"cu_tokens": (num_requests + 1,), "cu_logits": (num_requests + 1,), "logit_rows": (num_logits,)}
    return shapes | _request_shapes(network, num_requests)


def draft_shapes(network: Network, num_requests: int) -> dict[str, Shape]:
    """Return the input shapes of a draft pass, caches left out."""
    fixed = {name: network.dims(name) for name in network.inputs if -1 not in network.dims(name)}
    return fixed | _request_shapes(network, num_requests)


def _request_shapes(network: Network, num_requests: int) -> dict[str, Shape]:
    """Return the shapes of those inputs that have one entry a request."""
    found = {}
    for name in ("page_table", *_PER_REQUEST, *_DRAFTED):
        if name in network.inputs:
            found[name] = (num_requests, *network.dims(name)[1:])
    return found
