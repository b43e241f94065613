"""Running the draft and acceptance kernels on a backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.kernels.backends import Backend, Buffer
from helpers.kernels.round_cases import Array, RoundCase
from trtllm_dspark.plugins import ELEMENT_TYPES

HEAD_KINDS = {"none": 0, "vanilla": 1, "gated": 2, "rnn": 3}
ACCEPTANCES = {"greedy": 0, "rejection": 1, "coupled": 2}

Outputs = dict[str, Array]


Problem = tuple[dict[str, Any], dict[str, "Array | None"], dict[str, "tuple[tuple[int, ...], Any] | None"]]
"""Scalars, inputs (None = null) and outputs (shape and dtype; None = null) of one launch."""


def run_draft(backend: Backend, case: RoundCase) -> Outputs:
    """Launch `markov_draft` and return its outputs by name."""
    return launch(backend, "markov_draft", *draft_problem(case))


def run_accept(backend: Backend, case: RoundCase, draft: Outputs) -> Outputs:
    """Launch `ragged_accept` on a draft that `run_draft` made."""
    return launch(backend, "ragged_accept", *accept_problem(case, draft))


def draft_problem(case: RoundCase) -> Problem:
    """Parameters of `markov_draft`."""
    shape = case.shape
    requests, gamma = shape.num_requests, shape.draft_len
    draft_vocab = case.base_logits.shape[2]
    width = shape.num_candidates or draft_vocab
    sampled = shape.acceptance != "greedy"
    inputs: dict[str, Array | None] = {
        "base_logits": case.base_logits,
        "hidden": case.hidden if shape.head_kind in ("gated", "rnn") else None,
        "anchors": case.anchors,
        "positions": case.positions,
        "temperature": case.temperature,
        "top_k": case.top_k,
        "top_p": case.top_p,
        "seed": case.seeds.view(np.int64),
        "target_of_draft": case.target_of_draft,
        "draft_of_target": case.draft_of_target,
    }
    for name in ("w1", "w2", "w1_scale", "w2_scale", "gate_weight", "gate_bias", "rnn_weight", "rnn_bias"):
        inputs[name] = case.weights.get(name)
    outputs: dict[str, tuple[tuple[int, ...], Any] | None] = {
        "draft_tokens": ((requests, gamma), np.int32),
        "draft_entries": ((requests, gamma), np.int32),
        "draft_logits": ((requests, gamma, width), np.float32) if sampled else None,
        "draft_laws": ((requests, gamma, 4), np.float32),
        "draft_totals": ((requests, gamma), np.int64),
        "candidates": ((requests, gamma, shape.num_candidates), np.int32) if shape.num_candidates else None,
        "status": ((requests,), np.int32),
    }
    scalars = {
        "num_requests": requests,
        "draft_len": gamma,
        "vocab": shape.vocab,
        "draft_vocab": draft_vocab,
        "rank": shape.rank if shape.head_kind != "none" else 0,
        "hidden_size": shape.hidden_size if shape.head_kind in ("gated", "rnn") else 0,
        "head_kind": HEAD_KINDS[shape.head_kind],
        "acceptance": ACCEPTANCES[shape.acceptance],
        "num_candidates": shape.num_candidates,
        "logits_type": ELEMENT_TYPES[shape.logits_type],
        "weight_type": ELEMENT_TYPES[shape.weight_type],
        "hidden_type": ELEMENT_TYPES["float32"],
    }
    return scalars, inputs, outputs


def accept_problem(case: RoundCase, draft: Outputs) -> Problem:
    """Parameters of `ragged_accept`."""
    shape = case.shape
    requests, gamma = shape.num_requests, shape.draft_len
    inputs: dict[str, Array | None] = {
        "target_logits": case.target_logits,
        "cu_tokens": case.cu_tokens,
        "draft_tokens": draft["draft_tokens"],
        "draft_entries": draft["draft_entries"],
        "draft_logits": draft.get("draft_logits"),
        "draft_laws": draft["draft_laws"],
        "draft_totals": draft["draft_totals"],
        "candidates": draft.get("candidates"),
        "draft_of_target": case.draft_of_target,
        "temperature": case.temperature,
        "top_k": case.top_k,
        "top_p": case.top_p,
        "seed": case.seeds.view(np.int64),
        "positions": case.positions,
    }
    outputs: dict[str, tuple[tuple[int, ...], Any] | None] = {
        "out_tokens": ((requests, gamma + 1), np.int32),
        "emitted_len": ((requests,), np.int32),
        "status": ((requests,), np.int32),
    }
    scalars = {
        "num_tokens": len(case.target_logits),
        "num_requests": requests,
        "draft_len": gamma,
        "vocab": shape.vocab,
        "draft_vocab": case.base_logits.shape[2],
        "num_candidates": shape.num_candidates,
        "acceptance": ACCEPTANCES[shape.acceptance],
        "logits_type": ELEMENT_TYPES[shape.logits_type],
        "logits_stride": case.stride,
    }
    return scalars, inputs, outputs


Placed = tuple[dict[str, Any], dict[str, Buffer], dict[str, Buffer]]
"""Parameters of a launch, its input buffers and its output buffers."""


def place(
    backend: Backend,
    op: str,
    scalars: dict[str, Any],
    inputs: dict[str, Array | None],
    outputs: dict[str, tuple[tuple[int, ...], Any] | None],
) -> Placed:
    """Copy inputs, allocate poisoned outputs and workspace; nothing is launched."""
    sources = {name: backend.put(np.ascontiguousarray(array)) for name, array in inputs.items() if array is not None}
    results = {name: backend.empty(*spec) for name, spec in outputs.items() if spec is not None}
    params: dict[str, Any] = dict(scalars)
    for names, buffers in ((inputs, sources), (outputs, results)):
        params |= {name: buffers[name].address if name in buffers else None for name in names}
    if "workspace" in backend.library.fields(op):
        params["workspace"] = backend.empty((backend.library.workspace_bytes(op, **scalars),), np.uint8).address
    return params, sources, results


def launch(
    backend: Backend,
    op: str,
    scalars: dict[str, Any],
    inputs: dict[str, Array | None],
    outputs: dict[str, tuple[tuple[int, ...], Any] | None],
) -> Outputs:
    """Place, launch, read back."""
    params, _, results = place(backend, op, scalars, inputs, outputs)
    backend.library.launch(op, **params)
    backend.synchronize()
    return {name: buffer.read() for name, buffer in results.items()}
