"""The two graphs of a plugin engine: one pass drafts and schedules, one verifies, accepts and absorbs.

Draft graph (`drafter.onnx`): the drafter's block, DsparkMarkovDraft, DsparkConfidenceSchedule. Verify graph
(`target.onnx`): the target, DsparkRaggedAccept, and the update of the drafter's context with the features of every row.
A rejected row's context lies behind the request's end and is overwritten before anything reads it: the next block
begins at the position behind the last accepted token and reaches at least as far. The context therefore never has
holes, and no features leave the graph.

docs/tensorrt.md lists inputs and outputs. Between the two graphs nothing has to visit the host: the packed rows that
the draft graph returns (token_ids, token_request, token_position, cu_tokens) are the verify graph's rows.
Source: DSpark paper, section 3.1, equations 4-7, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph.drafter import DrafterSource, append_block, append_context
from trtllm_dspark.graph.heads import head_arrays
from trtllm_dspark.graph.lowering.base import check_weight_dtype
from trtllm_dspark.graph.lowering.trt_plugin import TrtPluginLowering
from trtllm_dspark.graph.matrices import WeightDtype
from trtllm_dspark.graph.network import FLOAT_DTYPES, Network, WeightFile
from trtllm_dspark.graph.plugin_nodes import plugin
from trtllm_dspark.graph.round_heads import PREFIX, DraftHeads, draft_of_target, sampling_inputs
from trtllm_dspark.graph.round_options import Acceptance, RoundOptions
from trtllm_dspark.graph.target import TARGET_GRAPH, WrittenTarget, append_target
from trtllm_dspark.graph.weights import Arrays, Progress, Weights

DRAFTER_GRAPH = "drafter.onnx"


@dataclass(frozen=True, slots=True)
class RoundDrafter:
    """The drafter as the verify graph needs it.

    Attributes:
        lowering: of the drafter's graph; its type may differ from the target's, lengths and slots may not.
        draft_token_ids: [Vd] target ids the drafter proposes from; None = all.
    """

    config: DrafterConfig
    arrays: Arrays
    lowering: TrtPluginLowering
    max_draft_len: int
    weight_dtype: WeightDtype
    draft_token_ids: NDArray[np.int64] | None = None

    @property
    def draft_vocab_size(self) -> int:
        """Vd."""
        return self.config.backbone.vocab_size if self.draft_token_ids is None else int(self.draft_token_ids.size)


def write_verify(
    directory: Path,
    config: ModelConfig,
    arrays: Arrays,
    *,
    max_seq_len: int,
    lowering: TrtPluginLowering,
    options: RoundOptions,
    drafter: RoundDrafter | None = None,
    weight_dtype: WeightDtype = "bfloat16",
    progress: Progress | None = None,
) -> WrittenTarget:
    """Write the verify graph (`target.onnx`) and its data file into `directory`.

    Args:
        directory: an existing directory.
        config: the target.
        arrays: canonical names -> float32 arrays of the target.
        max_seq_len: tokens of a request.
        lowering: of the target.
        options: what the round is compiled for.
        drafter: the drafter whose context the graph keeps; None decodes plainly, one token a request and pass.
        weight_dtype: storage of the target's linear layers.
        progress: called with each weight's name after it is stored.

    Returns:
        The files and the stored embedding and head, for `write_draft`.

    Raises:
        ConfigError: a feature layer does not exist, or caches or weight types do not fit.
        ShapeError: a tensor is missing or has another shape than the configuration says.
        EngineError: TensorRT or a plugin would refuse or misread the graph.
    """
    if drafter is not None:
        _check_drafter(drafter, lowering)
    file = WeightFile(directory / f"{TARGET_GRAPH}.data")
    try:
        net = Network("target", file, lowering.dtype)
        layers = () if drafter is None else drafter.config.target_layer_ids
        weights = Weights(arrays, weight_dtype, progress)
        body = append_target(net, weights, config, lowering, max_seq_len, layers)
        net.output(body.logits, "logits", net.dtype, ["L", config.vocab_size])
        _append_accept(net, config.vocab_size, options, drafter)
        if drafter is not None and body.features is not None:
            features = net.cast(body.features, net.dtype, FLOAT_DTYPES["float32"])
            net.dtype = drafter.lowering.dtype
            own = Weights(drafter.arrays, drafter.weight_dtype, progress, PREFIX)
            positions = max_seq_len + drafter.config.block_size
            append_context(net, own, drafter.config, drafter.lowering, positions, features)
        net.save(directory / TARGET_GRAPH, lowering.check)
    finally:
        file.close()
    return WrittenTarget((directory / TARGET_GRAPH, file.path), body.embedding, body.head)


def _check_drafter(drafter: RoundDrafter, lowering: TrtPluginLowering) -> None:
    check_weight_dtype(drafter.lowering, drafter.weight_dtype)
    same = ("cache_length", "num_slots")
    if any(getattr(drafter.lowering, name) != getattr(lowering, name) for name in same):
        raise ConfigError(
            f"target and drafter have caches of {lowering.num_slots} x {lowering.cache_length} and "
            f"{drafter.lowering.num_slots} x {drafter.lowering.cache_length} tokens; give both the same lowering sizes"
        )


def _append_accept(net: Network, vocab: int, options: RoundOptions, drafter: RoundDrafter | None) -> None:
    gamma = 1 if drafter is None else drafter.max_draft_len
    sampled = drafter is not None and options.acceptance != "greedy"
    candidates = options.accept_candidates if drafter is not None else 0
    inputs = sampling_inputs(net) | {"target_logits": "logits"}
    inputs["cu_tokens"] = net.input("cu_logits", np.int32, ["R+1"])
    if drafter is None:
        # Nothing is ever verified; the plugin wants the tensor all the same.
        rows = net.node("Unsqueeze", inputs["positions"], net.ints(1))
        inputs["draft_tokens"] = net.node(
            "Sub", net.node("Mul", rows, net.scalar(0, np.int32)), net.scalar(1, np.int32)
        )
    else:
        inputs["draft_tokens"] = net.input("draft_tokens", np.int32, ["R", gamma])
    mapped = sampled and drafter is not None and drafter.draft_token_ids is not None
    if sampled and drafter is not None:
        width = candidates or drafter.draft_vocab_size
        inputs["draft_entries"] = net.input("draft_entries", np.int32, ["R", gamma])
        inputs["draft_laws"] = net.input("draft_laws", np.float32, ["R", gamma, 4])
        inputs["draft_totals"] = net.input("draft_totals", np.int64, ["R", gamma])
        inputs["draft_logits"] = net.input("draft_logits", np.float32, ["R", gamma, width])
        if candidates:
            inputs["candidates"] = net.input("candidates", np.int32, ["R", gamma, candidates])
        if mapped and drafter.draft_token_ids is not None:
            inputs["draft_of_target"] = net.weight("draft_of_target", draft_of_target(vocab, drafter.draft_token_ids))
    fields = {
        "acceptance": get_args(Acceptance).index(options.acceptance),
        "sampled_draft": int(sampled),
        "num_candidates": candidates,
        "mapped_vocab": int(mapped),
    }
    names = {name: name for name in ("out_tokens", "emitted_len", "status")}
    plugin(net, "DsparkRaggedAccept", inputs, fields, outputs=names)
    net.output("out_tokens", "out_tokens", np.int32, ["R", gamma + 1])
    net.output("emitted_len", "emitted_len", np.int32, ["R"])
    net.output("status", "status", np.int32, ["R"])


def write_draft(
    directory: Path,
    source: DrafterSource,
    *,
    max_seq_len: int,
    max_draft_len: int,
    max_num_tokens: int,
    lowering: TrtPluginLowering,
    options: RoundOptions,
    draft_token_ids: NDArray[np.int64] | None = None,
    weight_dtype: WeightDtype = "bfloat16",
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write the draft graph (`drafter.onnx`) and its data file into `directory`.

    Args:
        directory: where `write_verify` wrote; the graph refers to the target's data file for what it shares.
        source: drafter and target.
        max_seq_len: tokens of a request.
        max_draft_len: draft tokens of a block, at most the block size the drafter was trained with.
        max_num_tokens: tokens of the largest verify pass: the cost table has one entry more.
        lowering: of the drafter.
        options: what the round is compiled for.
        draft_token_ids: [Vd] target ids the drafter proposes from; None = all.
        weight_dtype: storage of the linear layers.
        progress: called with each weight's name after it is stored.

    Returns:
        The files written.

    Raises:
        ConfigError: drafter and target do not fit, the schedule needs a confidence head, or a limit is out of range.
        ShapeError: a tensor is missing or has another shape than the configuration says.
        EngineError: TensorRT or a plugin would refuse or misread the graph.
    """
    source.check(max_draft_len)
    check_weight_dtype(lowering, weight_dtype)
    config = source.config
    if not config.confidence and options.schedule != "fixed":
        raise ConfigError(
            f"the drafter has no confidence head, which the {options.schedule} schedule reads; use the fixed schedule"
        )
    file = WeightFile(directory / f"{DRAFTER_GRAPH}.data")
    try:
        net = Network("drafter", file, lowering.dtype)
        weights = Weights(source.arrays, weight_dtype, progress, PREFIX)
        anchors = net.input("anchors", np.int32, ["R"])
        masks = net.constant(np.full(config.block_size - 1, config.mask_token_id, np.int32))
        ids = _block_ids(net, anchors, masks) if config.block_size > 1 else anchors
        body = append_block(
            net, source, weights, lowering, max_seq_len + config.block_size, max_draft_len, draft_token_ids, ids
        )
        heads = head_arrays(
            config, source.arrays, vocab_size=source.target_config.vocab_size, draft_token_ids=draft_token_ids
        )
        drafting = DraftHeads(net, config, options, heads, body, source.target_config.vocab_size, max_draft_len)
        drafting.append_chain(draft_token_ids)
        drafting.append_schedule(max_num_tokens)
        net.save(directory / DRAFTER_GRAPH, lowering.check)
    finally:
        file.close()
    return directory / DRAFTER_GRAPH, file.path


def _block_ids(net: Network, anchors: str, masks: str) -> str:
    """Return [R * gamma] token ids: each anchor, then masks."""
    first = net.node("Unsqueeze", anchors, net.ints(1))
    count = net.node("Shape", anchors)
    rest = net.node("Expand", masks, net.node("Concat", count, net.node("Shape", masks), axis=0))
    return net.node("Reshape", net.node("Concat", first, rest, axis=1), net.ints(-1))
