"""Items of the engine process -> output arrays of a Triton response. No Triton import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.serving.framing import Message
from trtllm_dspark.serving.request_fields import Wanted

Arrays = list[tuple[str, NDArray[Any]]]


def _text(*values: str) -> NDArray[Any]:
    return np.array([value.encode("utf-8") for value in values], dtype=object)


def _scalar(value: float, dtype: type) -> NDArray[Any]:
    return np.array([[value]], dtype=dtype)


def response_arrays(item: Message, wanted: Wanted, *, token_level: bool, row: int | None = None) -> Arrays:
    """Return the outputs of one item.

    Args:
        item: an item of an `outputs` frame.
        wanted: optional outputs.
        token_level: ids instead of text.
        row: batch row, only where the request has several.
    """
    arrays: Arrays = []
    if token_level:
        tokens = item.get("tokens", [])
        arrays.append(("output_ids", np.array([[tokens]], dtype=np.int32).reshape(1, 1, len(tokens))))
        arrays.append(("sequence_length", np.array([[len(tokens)]], dtype=np.int32)))
    else:
        # One dimension although the model batches: what clients of this contract index.
        arrays.append(("text_output", _text(item["text"])))
    if "finish_reason" in item:
        arrays.append(("finish_reason", _text(item["finish_reason"])))
        if "stop_reason" in item:
            arrays.append(("stop_reason", _text(item["stop_reason"])))
    if row is not None:
        arrays.append(("batch_index", _scalar(row, np.int32)))
        arrays.append(("sequence_index", _scalar(0, np.int32)))
    stats = item.get("stats") or {}
    if wanted.num_input_tokens and "finish_reason" in item:
        arrays.append(("num_input_tokens", _scalar(stats.get("num_prompt_tokens", 0), np.int32)))
    if wanted.num_output_tokens:
        # Clients add the counts of all responses up.
        arrays.append(("num_output_tokens", _scalar(item.get("num_tokens", 0), np.int32)))
    if wanted.log_probs:
        logprobs = np.array([[item.get("logprobs", [])]], dtype=np.float32)
        arrays.append(("output_log_probs", logprobs))
        arrays.append(("cum_log_probs", logprobs.sum(axis=-1)))
    if wanted.perf_metrics:
        arrays.extend(_perf_arrays(stats))
    return arrays


def _perf_arrays(stats: Message) -> Arrays:
    times: Sequence[int] = stats.get("times_ns", (0, 0, 0, 0))
    verified, accepted = int(stats.get("verified", 0)), int(stats.get("accepted", 0))
    return [
        # The cache is one contiguous slot a request: one block taken, none reused.
        ("kv_cache_alloc_new_blocks", _scalar(1, np.int32)),
        ("kv_cache_reused_blocks", _scalar(0, np.int32)),
        ("kv_cache_alloc_total_blocks", _scalar(1, np.int32)),
        ("arrival_time_ns", _scalar(times[0], np.int64)),
        ("first_scheduled_time_ns", _scalar(times[1], np.int64)),
        ("first_token_time_ns", _scalar(times[2], np.int64)),
        ("last_token_time_ns", _scalar(times[3], np.int64)),
        ("acceptance_rate", _scalar(accepted / verified if verified else 0.0, np.float32)),
        ("total_accepted_draft_tokens", _scalar(accepted, np.int32)),
        ("total_draft_tokens", _scalar(verified, np.int32)),
        ("accepted_len", _scalar(stats.get("accepted_len") or 0.0, np.float32)),
        ("num_rounds", _scalar(stats.get("rounds", 0), np.int32)),
        ("verified_per_position", np.array([stats.get("verified_per_position", [])], dtype=np.int32)),
        ("accepted_per_position", np.array([stats.get("accepted_per_position", [])], dtype=np.int32)),
    ]


def merge_rows(rows: Sequence[Arrays]) -> Arrays:
    """Join the outputs of all rows of a unary request along the batch dimension; shorter rows are padded with -1."""
    if len(rows) == 1:
        return list(rows[0])
    merged: Arrays = []
    names = [name for name, _ in rows[0]]
    for name in names:
        parts = [dict(row).get(name) for row in rows]
        present = [part for part in parts if part is not None]
        if len(present) != len(rows):
            continue  # stop_reason, where only some rows have one
        width = max(part.shape[-1] for part in present)
        merged.append((name, np.concatenate([_pad(part, width) for part in present], axis=0)))
    return merged


def _pad(array: NDArray[Any], width: int) -> NDArray[Any]:
    if array.ndim < 2 or array.shape[-1] == width:
        return array
    padding = [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]
    return np.pad(array, padding, constant_values=-1)
