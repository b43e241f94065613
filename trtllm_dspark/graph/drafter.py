"""The drafter's networks: one absorbs committed features into its context, one runs a block of masks.

Source: DSpark paper, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph.heads import head_arrays
from trtllm_dspark.graph.layers import decoder_layers
from trtllm_dspark.graph.lowering import ORT, Lowering, check_weight_dtype
from trtllm_dspark.graph.matrices import FloatMatrix, StoredMatrix, WeightDtype, embedding_dtype
from trtllm_dspark.graph.native_heads import NativeHeads
from trtllm_dspark.graph.network import FLOAT_DTYPES, Network, WeightFile
from trtllm_dspark.graph.target import WrittenTarget
from trtllm_dspark.graph.weights import Arrays, Progress, Weights

CONTEXT_GRAPH = "drafter_context.onnx"
BLOCK_GRAPH = "drafter_block.onnx"


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """A drafter and the target whose embedding and head it may share."""

    config: DrafterConfig
    arrays: Arrays
    target_config: ModelConfig
    target_arrays: Arrays
    target: WrittenTarget

    def check(self, max_draft_len: int) -> None:
        """Refuse a drafter that does not fit its target or the blocks asked for.

        Raises:
            ConfigError: it does not.
        """
        config = self.config
        if not 1 <= max_draft_len <= config.block_size:
            raise ConfigError(
                f"max_draft_len is {max_draft_len}, this drafter allows 1..{config.block_size}; change it"
            )
        if "embed.weight" not in self.arrays and config.backbone.hidden_size != self.target_config.hidden_size:
            raise ConfigError(
                f"the drafter shares the target's embedding but its hidden size is {config.backbone.hidden_size}, "
                f"the target's {self.target_config.hidden_size}; use the drafter trained for this target"
            )

    def head_rows(self, weights: Weights) -> NDArray[np.float32]:
        """Return the output head [V, d] in float32: the drafter's own or the target's."""
        shape = (self.target_config.vocab_size, self.config.backbone.hidden_size)
        if "lm_head.weight" in self.arrays:
            return weights.read("lm_head.weight", shape)
        name = "embed.weight" if self.target_config.tie_word_embeddings else "lm_head.weight"
        return Weights(self.target_arrays, "float32").read(name, shape)


def write_drafter(
    directory: Path,
    source: DrafterSource,
    *,
    max_seq_len: int,
    max_draft_len: int,
    draft_token_ids: NDArray[np.int64] | None = None,
    weight_dtype: WeightDtype = "int8",
    lowering: Lowering = ORT,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write the drafter's context and block graphs with their data files into `directory`.

    Context graph: features [T, m * d], positions [T], pad_index [R, S], write_indices [R] -> caches only.
    Block graph: input_ids [R, gamma] (anchor, masks), write_indices [R] (the anchor's position) -> base_logits
    [R, max_draft_len, Vd], hidden [R, max_draft_len, d]; its K and V lie behind the context until they are overwritten.
    Both bind the same past_/present_{k,v}.{layer} caches. With a lowering of `native_heads` the block graph also gives
    draft_tokens [R, max_draft_len] int64 and, with a confidence head, confidence [R, max_draft_len] from the inputs
    inv_temperature and position_bias [max_draft_len].

    Args:
        directory: where `write_target` wrote; the block graph refers to the target's data file for what it shares.
        source: drafter and target.
        max_seq_len: tokens of a request; the rotary tables reach one block further.
        max_draft_len: slots of a block whose logits are computed, at most the block size it was trained with.
        draft_token_ids: [Vd] target ids the drafter proposes from; None = all.
        weight_dtype: storage of the linear layers.
        lowering: spelling of attention.
        progress: called with each weight's name after it is stored.

    Returns:
        The files written.

    Raises:
        ConfigError: drafter and target do not fit, or a limit is out of range.
        ShapeError: a tensor is missing or has another shape than the configuration says.
    """
    source.check(max_draft_len)
    check_weight_dtype(lowering, weight_dtype)
    config = source.config
    weights = Weights(source.arrays, weight_dtype, progress)
    num_positions = max_seq_len + config.block_size
    context = _write_context(directory, config, weights, num_positions, lowering)
    block = _write_block(directory, source, weights, num_positions, max_draft_len, draft_token_ids, lowering)
    return context + block


def _write_context(
    directory: Path, config: DrafterConfig, weights: Weights, num_positions: int, lowering: Lowering
) -> tuple[Path, ...]:
    file = WeightFile(directory / f"{CONTEXT_GRAPH}.data")
    try:
        net = Network("drafter_context", file, lowering.dtype)
        features = net.input("features", np.float32, ["T", config.feature_size])
        append_context(net, weights, config, lowering, num_positions, features)
        net.save(directory / CONTEXT_GRAPH, lowering.check)
    finally:
        file.close()
    return directory / CONTEXT_GRAPH, file.path


def append_context(
    net: Network, weights: Weights, config: DrafterConfig, lowering: Lowering, num_positions: int, features: str
) -> None:
    """Append the update of the drafter's context with target features [T, m * d] float32."""
    backbone, single = config.backbone, FLOAT_DTYPES["float32"]
    # The target's features exceed float16's range: they are projected and normed in float32 whatever follows.
    dtype: WeightDtype = weights.dtype if net.dtype == single else "float32"
    rows = weights.linear(net, features, ["fc"], [backbone.hidden_size], config.feature_size, dtype=dtype)
    name = f"{weights.prefix}hidden_norm.weight"
    scale = net.weight(name, weights.read("hidden_norm.weight", (backbone.hidden_size,)))
    rows = net.node("RMSNormalization", rows, scale, axis=-1, epsilon=backbone.rms_norm_eps, stash_type=1)
    rows = net.cast(rows, single, net.dtype)
    absorb = lowering.context(net, backbone, num_positions)
    for layer in range(backbone.num_layers):
        # The context's K and V come from hidden_norm directly; attn_norm belongs to the block's path only.
        absorb(net, weights, layer, rows)


def _write_block(
    directory: Path,
    source: DrafterSource,
    weights: Weights,
    num_positions: int,
    max_draft_len: int,
    draft_token_ids: NDArray[np.int64] | None,
    lowering: Lowering,
) -> tuple[Path, ...]:
    config, gamma = source.config, source.config.block_size
    file = WeightFile(directory / f"{BLOCK_GRAPH}.data")
    try:
        net = Network("drafter_block", file, lowering.dtype)
        rows = net.input("input_ids", np.int64, ["R", gamma])
        ids = net.node("Reshape", rows, net.ints(-1))
        block = append_block(net, source, weights, lowering, num_positions, max_draft_len, draft_token_ids, ids)
        for name, value, dtype, width in (
            ("hidden", block.hidden, net.dtype, config.backbone.hidden_size),
            ("base_logits", block.base_logits, block.logits_dtype, block.draft_vocab_size),
        ):
            single = net.cast(value, dtype, FLOAT_DTYPES["float32"])
            shaped = net.node("Reshape", single, net.ints(-1, max_draft_len, width), out=name)
            net.output(shaped, name, np.float32, ["R", max_draft_len, width])
        if lowering.native_heads:
            hidden = net.node("Reshape", block.hidden, net.ints(-1, max_draft_len, config.backbone.hidden_size))
            anchors = net.node("Gather", rows, net.scalar(0, np.int64), axis=1)
            vocab = source.target_config.vocab_size
            heads = head_arrays(config, source.arrays, vocab_size=vocab, draft_token_ids=draft_token_ids)
            native = NativeHeads(net, config, heads, hidden, "base_logits", anchors, max_draft_len)
            native.append(draft_token_ids)
        net.save(directory / BLOCK_GRAPH, lowering.check)
    finally:
        file.close()
    return directory / BLOCK_GRAPH, file.path


@dataclass(frozen=True, slots=True)
class BlockBody:
    """Values of a drafter's block.

    Attributes:
        hidden: [R * n, d] in the graph's type, n slots of each block.
        base_logits: [R * n, Vd] in `logits_dtype`.
        draft_vocab_size: Vd.
    """

    hidden: str
    base_logits: str
    logits_dtype: np.dtype[Any]
    draft_vocab_size: int


def append_block(
    net: Network,
    source: DrafterSource,
    weights: Weights,
    lowering: Lowering,
    num_positions: int,
    max_draft_len: int,
    draft_token_ids: NDArray[np.int64] | None,
    ids: str,
) -> BlockBody:
    """Append the backbone over blocks of token ids [R * gamma], up to its logits."""
    backbone, gamma, size = source.config.backbone, source.config.block_size, source.config.backbone.hidden_size
    embedding = drafter_embedding(net, source, weights)
    x = net.cast(embedding.gather(net, ids), float_dtype(embedding, net), net.dtype)
    attention = lowering.block(net, backbone, num_positions, gamma)
    x = decoder_layers(net, weights, backbone, x, lowering, attention)[-1]
    if max_draft_len < gamma:
        blocks = net.node("Reshape", x, net.ints(-1, gamma, size))
        kept = net.node("Slice", blocks, net.ints(0), net.ints(max_draft_len), net.ints(1))
        x = net.node("Reshape", kept, net.ints(-1, size))
    hidden = weights.norm(net, x, "norm", size, backbone.rms_norm_eps)
    head = drafter_head(net, source, weights, draft_token_ids)
    head_dtype = float_dtype(head, net)
    logits = head.multiply(net, net.cast(hidden, net.dtype, head_dtype))
    return BlockBody(hidden, logits, head_dtype, head.rows)


def float_dtype(matrix: StoredMatrix, net: Network) -> np.dtype[Any]:
    """Return the type a table computes in: one shared with the target keeps the target's."""
    return matrix.values.dtype if isinstance(matrix, FloatMatrix) else net.dtype


def drafter_embedding(net: Network, source: DrafterSource, weights: Weights) -> StoredMatrix:
    """Store the drafter's own table, or refer to the target's bytes: nothing is held twice."""
    if "embed.weight" not in source.arrays:
        return source.target.embedding
    shape = (source.target_config.vocab_size, source.config.backbone.hidden_size)
    return weights.store(
        net, "embed.weight", weights.read("embed.weight", shape), embedding_dtype(weights.dtype, net.dtype)
    )


def drafter_head(
    net: Network, source: DrafterSource, weights: Weights, draft_token_ids: NDArray[np.int64] | None
) -> StoredMatrix:
    """Store the rows of a reduced vocabulary, or share the target's whole head."""
    if draft_token_ids is None and "lm_head.weight" not in source.arrays:
        return source.target.head
    rows = source.head_rows(weights)
    if draft_token_ids is not None:
        rows = np.ascontiguousarray(rows[draft_token_ids])
    return weights.store(net, "lm_head.weight", rows, embedding_dtype(weights.dtype, net.dtype))
