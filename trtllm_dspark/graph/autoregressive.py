"""Networks of the autoregressive drafters: one takes in pairs of committed features and tokens, one drafts a token.

Row j of the head's cache pairs the target's feature of token j with token j + 1. Written for ONNX Runtime only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.graph.drafter import CONTEXT_GRAPH, DrafterSource, drafter_embedding, drafter_head
from trtllm_dspark.graph.layers import finish_layer
from trtllm_dspark.graph.lowering import ORT, check_weight_dtype
from trtllm_dspark.graph.matrices import WeightDtype
from trtllm_dspark.graph.network import Network, WeightFile
from trtllm_dspark.graph.weights import Progress, Weights

STEP_GRAPH = "drafter_step.onnx"


def write_autoregressive(
    directory: Path,
    source: DrafterSource,
    *,
    max_seq_len: int,
    max_draft_len: int,
    draft_token_ids: NDArray[np.int64] | None = None,
    weight_dtype: WeightDtype = "int8",
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write the context and step graphs of an `eagle3` or `mtp` drafter with their data files into `directory`.

    Context graph: features [T, m * d], input_ids [T] (the token behind each), positions [T], pad_index [R, S],
    write_indices [R] -> state [T, d], what stands for the features in the head, and the caches.
    Step graph: state [T, d], input_ids [T], positions, pack_index [T], pad_index [R, S], write_indices [R] -> logits
    [T, Vd], hidden [T, d], the state of the next step, and the caches.
    Both bind the same past_/present_{k,v}.0 caches.

    Args:
        directory: where `write_target` wrote; the step graph refers to the target's data file for what it shares.
        source: drafter and target.
        max_seq_len: tokens of a request; the rotary tables reach one block further.
        max_draft_len: drafts of a round, at most those it was trained for.
        draft_token_ids: [Vd] target ids the drafter proposes from; None = all.
        weight_dtype: storage of the linear layers.
        progress: called with each weight's name after it is stored.

    Returns:
        The files written.

    Raises:
        ConfigError: drafter and target do not fit, or a limit is out of range.
        ShapeError: a tensor is missing or has another shape than the configuration says.
    """
    source.check(max_draft_len)
    check_weight_dtype(ORT, weight_dtype)
    weights = Weights(source.arrays, weight_dtype, progress)
    num_positions = max_seq_len + source.config.block_size
    context = _write_context(directory, source, weights, num_positions)
    return context + _write_step(directory, source, weights, num_positions, draft_token_ids)


def _write_context(directory: Path, source: DrafterSource, weights: Weights, num_positions: int) -> tuple[Path, ...]:
    config, size = source.config, source.config.backbone.hidden_size
    file = WeightFile(directory / f"{CONTEXT_GRAPH}.data")
    try:
        net = Network("drafter_context", file, ORT.dtype)
        state = net.input("features", np.float32, ["T", config.feature_size])
        if config.kind == "eagle3":
            state = weights.linear(net, state, ["fc"], [size], config.feature_size)
        _, normed = _inputs(net, source, weights, state)
        ORT.context(net, config.backbone, num_positions, _attention_width(config))(net, weights, 0, normed)
        net.output(state, "state", np.float32, ["T", size])
        net.save(directory / CONTEXT_GRAPH)
    finally:
        file.close()
    return directory / CONTEXT_GRAPH, file.path


def _write_step(
    directory: Path,
    source: DrafterSource,
    weights: Weights,
    num_positions: int,
    draft_token_ids: NDArray[np.int64] | None,
) -> tuple[Path, ...]:
    config, model = source.config, source.config.backbone
    file = WeightFile(directory / f"{STEP_GRAPH}.data")
    try:
        net = Network("drafter_step", file, ORT.dtype)
        state = net.input("state", np.float32, ["T", model.hidden_size])
        x, normed = _inputs(net, source, weights, state)
        mixed = ORT.causal(net, model, num_positions, _attention_width(config))(net, weights, 0, normed)
        hidden = net.node("Add", *finish_layer(net, weights, model, ORT, 0, x, mixed))
        net.output(hidden, "hidden", np.float32, ["T", model.hidden_size])
        head = drafter_head(net, source, weights, draft_token_ids)
        logits = head.multiply(net, weights.norm(net, hidden, "norm", model.hidden_size, model.rms_norm_eps))
        net.output(logits, "logits", np.float32, ["T", head.rows])
        net.save(directory / STEP_GRAPH)
    finally:
        file.close()
    return directory / STEP_GRAPH, file.path


def _attention_width(config: DrafterConfig) -> int:
    return config.backbone.hidden_size * (2 if config.kind == "eagle3" else 1)


def _inputs(net: Network, source: DrafterSource, weights: Weights, state: str) -> tuple[str, str]:
    """Append pairs of `state` [T, d] with the tokens of the graph input input_ids [T].

    Returns:
        The residual stream [T, d] and the input of the attention: [T, 2 d] for `eagle3`, else [T, d].
    """
    model = source.config.backbone
    size, eps = model.hidden_size, model.rms_norm_eps
    ids = net.input("input_ids", np.int64, ["T"])
    embedded = weights.norm(net, drafter_embedding(net, source, weights).gather(net, ids), "embed_norm", size, eps)
    pairs = net.node("Concat", embedded, weights.norm(net, state, "hidden_norm", size, eps), axis=1)
    if source.config.kind == "eagle3":
        return state, pairs
    joined = weights.linear(net, pairs, ["eh_proj"], [size], 2 * size)
    return joined, weights.norm(net, joined, "layers.0.attn_norm", size, eps)
