"""The target network: packed ragged rows in, logits of chosen rows and drafter features out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph.layers import decoder_layers
from trtllm_dspark.graph.lowering import ORT, Lowering, check_weight_dtype
from trtllm_dspark.graph.matrices import StoredMatrix, WeightDtype, embedding_dtype
from trtllm_dspark.graph.network import FLOAT_DTYPES, Network, WeightFile
from trtllm_dspark.graph.weights import Arrays, Progress, Weights

TARGET_GRAPH = "target.onnx"


@dataclass(frozen=True, slots=True)
class WrittenTarget:
    """What `write_target` wrote and what a drafter beside it may refer to."""

    files: tuple[Path, ...]
    embedding: StoredMatrix
    head: StoredMatrix


def write_target(
    directory: Path,
    config: ModelConfig,
    arrays: Arrays,
    *,
    max_seq_len: int,
    feature_layer_ids: Sequence[int] = (),
    weight_dtype: WeightDtype = "int8",
    lowering: Lowering = ORT,
    progress: Progress | None = None,
) -> WrittenTarget:
    """Write `target.onnx` and `target.onnx.data` into `directory`.

    Inputs: input_ids, positions, pack_index [T], pad_index [R, S], write_indices [R], logit_rows [L] (int64) and
    past_{k,v}.{layer} [R, Hkv, C, D]. Outputs: logits [L, V], features [T, m * d] if any, present_{k,v}.{layer}, which
    share memory with the past ones. Memory: about three times the largest tensor in float32.

    Args:
        directory: an existing directory.
        config: the target.
        arrays: canonical names -> float32 arrays, read once each.
        max_seq_len: positions the rotary tables cover.
        feature_layer_ids: decoder layers whose outputs are the features, in concatenation order.
        weight_dtype: storage of the linear layers.
        lowering: spelling of attention.
        progress: called with each weight's name after it is stored.

    Returns:
        The files and the stored embedding and head.

    Raises:
        ConfigError: a feature layer does not exist, or sizes do not fit `weight_dtype`.
        ShapeError: a tensor is missing or has another shape than the configuration says.
    """
    file = WeightFile(directory / f"{TARGET_GRAPH}.data")
    try:
        net = Network("target", file, lowering.dtype)
        weights = Weights(arrays, weight_dtype, progress)
        body = append_target(net, weights, config, lowering, max_seq_len, feature_layer_ids)
        single = FLOAT_DTYPES["float32"]
        net.output(net.cast(body.logits, net.dtype, single), "logits", np.float32, ["L", config.vocab_size])
        if body.features is not None:
            width = len(feature_layer_ids) * config.hidden_size
            net.output(net.cast(body.features, net.dtype, single), "features", np.float32, ["T", width])
        net.save(directory / TARGET_GRAPH, lowering.check)
    finally:
        file.close()
    return WrittenTarget((directory / TARGET_GRAPH, file.path), body.embedding, body.head)


@dataclass(frozen=True, slots=True)
class TargetBody:
    """Values of a target network in the graph's type.

    Attributes:
        logits: [L, V].
        features: [T, m * d], or None where no layer is captured.
    """

    logits: str
    features: str | None
    embedding: StoredMatrix
    head: StoredMatrix


def append_target(
    net: Network,
    weights: Weights,
    config: ModelConfig,
    lowering: Lowering,
    max_seq_len: int,
    feature_layer_ids: Sequence[int],
) -> TargetBody:
    """Append a target from the graph inputs input_ids [T] and logit_rows [L] to its logits and features.

    Raises:
        ConfigError: a feature layer does not exist, or sizes do not fit the weights' type.
        ShapeError: a tensor is missing or has another shape than the configuration says.
    """
    check_weight_dtype(lowering, weights.dtype)
    _check_layer_ids(feature_layer_ids, config.num_layers)
    table_shape = (config.vocab_size, config.hidden_size)
    dtype = embedding_dtype(weights.dtype, net.dtype)
    embedding = weights.store(net, "embed.weight", weights.read("embed.weight", table_shape), dtype)
    x = embedding.gather(net, net.input("input_ids", lowering.index_dtype, ["T"]))
    attention = lowering.causal(net, config, max_seq_len)
    outputs = decoder_layers(net, weights, config, x, lowering, attention)
    rows = net.node("Gather", outputs[-1], net.input("logit_rows", lowering.index_dtype, ["L"]), axis=0)
    hidden = weights.norm(net, rows, "norm", config.hidden_size, config.rms_norm_eps)
    head = embedding
    if not config.tie_word_embeddings:
        head = weights.store(net, "lm_head.weight", weights.read("lm_head.weight", table_shape), dtype)
    features = None
    if feature_layer_ids:
        captured = [outputs[layer] for layer in feature_layer_ids]
        features = captured[0] if len(captured) == 1 else net.node("Concat", *captured, axis=1)
    return TargetBody(head.multiply(net, hidden), features, embedding, head)


def _check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    for layer in layer_ids:
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"the drafter reads target layer {layer}, the target has layers 0..{num_layers - 1}; "
                "use the drafter trained for this target"
            )
