"""What all drafter dialects share: from normalised fields and tensors to a checked `DrafterCheckpoint`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from trtllm_dspark.checkpoint._hf_config import Fields, parse_model_config
from trtllm_dspark.checkpoint._mapping import TensorMapper, layer_shapes
from trtllm_dspark.checkpoint.arrays import Array, LazyArray, LazyArrays
from trtllm_dspark.checkpoint.config import DrafterConfig, MarkovHead, ModelConfig
from trtllm_dspark.checkpoint.int8_rows import unpack
from trtllm_dspark.checkpoint.safetensors_io import read_directory
from trtllm_dspark.checkpoint.types import CheckpointFile, DrafterCheckpoint
from trtllm_dspark.errors import CheckpointError

# Fields of a transformers configuration that do not change what a drafter computes here.
_NEUTRAL = frozenset(
    """
    _attn_implementation _name_or_path architectures attention_dropout attn_implementation auto_map
    chunk_size_feed_forward dtype id2label initializer_range is_decoder is_encoder_decoder label2id
    max_window_layers model_type name_or_path num_anchors output_attentions output_hidden_states problem_type
    return_dict torch_dtype transformers_version use_cache
    """.split()
)
_UNDERSTOOD = frozenset(
    """
    attention_bias block_size bos_token_id confidence_head_with_markov draft_vocab_size enable_confidence_head
    eos_token_id head_dim hidden_act hidden_size intermediate_size layer_types markov_head_type markov_rank
    mask_token_id max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
    num_target_layers pad_token_id partial_rotary_factor quantization quantization_config rms_norm_eps
    rope_parameters rope_scaling rope_theta sample_from_anchor sliding_window target_hidden_size target_layer_ids
    tie_word_embeddings use_sliding_window vocab_size
    """.split()
)


def build_drafter(
    directory: Path,
    fields: Fields,
    target: ModelConfig,
    dialect: str,
    rename: Callable[[str], str] = lambda name: name,
    ignore: tuple[str, ...] = (),
    with_weights: bool = True,
) -> DrafterCheckpoint:
    """Build the checked drafter.

    Args:
        directory: where the safetensors files are.
        fields: the configuration in DeepSpec's flat field names; an unknown field that is set is refused.
        target: the target it has to fit.
        dialect: name of the format, for the result.
        rename: from the file's tensor names to DeepSpec's.
        ignore: tensors that only training needs.
        with_weights: read the tensors too; without them `arrays` is empty.

    Raises:
        CheckpointError: the drafter is incomplete, not supported, or does not fit the target.
    """
    refuse_unknown_fields(fields, _UNDERSTOOD)
    if not fields.boolean("sample_from_anchor", True):
        raise CheckpointError(
            f"{fields.path}: sample_from_anchor is false (the anchor's slot predicts nothing); "
            "only drafters whose anchor predicts the first draft token are supported"
        )
    if not with_weights:
        config = _config(fields, target)
        check_fit(fields.path, config, target)
        return DrafterCheckpoint(config, LazyArrays({}), (CheckpointFile(fields.path),), dialect)
    stored, paths = read_directory(directory)
    unpacked = unpack(stored, fields.values.get("quantization"), fields.path)
    tensors: dict[str, LazyArray] = {}
    for name, tensor in unpacked.items():
        if rename(name) in tensors:
            raise CheckpointError(f"{directory} holds tensor {rename(name)} under two names")
        tensors[rename(name)] = tensor
    config = _config(fields, target)
    check_fit(fields.path, config, target)
    mapper = TensorMapper(directory, tensors)
    for name in ignore:
        mapper.drop(name)
    _map_drafter(mapper, config, target, fields)
    files = tuple(CheckpointFile(path) for path in (fields.path, *paths))
    return DrafterCheckpoint(config, mapper.finish(), files, dialect)


def refuse_unknown_fields(fields: Fields, understood: frozenset[str]) -> None:
    """Refuse a configuration with a field that is set, not understood and not known to change nothing.

    Raises:
        CheckpointError: there is one.
    """
    for name, value in fields.values.items():
        if name not in _NEUTRAL and name not in understood and value not in (None, [], {}):
            raise CheckpointError(
                f"{fields.path}: field {name} = {value!r} is not known and may change what the drafter computes; "
                "remove it if it does not, otherwise this drafter is not supported"
            )


def _config(fields: Fields, target: ModelConfig) -> DrafterConfig:
    backbone = parse_model_config(fields, "qwen3")
    rank = fields.integer("markov_rank", minimum=0)
    head = _markov_head(fields, rank)
    confidence = fields.boolean("enable_confidence_head")
    with_markov = confidence and fields.boolean("confidence_head_with_markov", False)
    if with_markov and head == "none":
        raise CheckpointError(f"{fields.path}: confidence_head_with_markov is true but markov_rank is 0")
    return DrafterConfig(
        backbone=replace(backbone, tie_word_embeddings=False),
        block_size=fields.integer("block_size"),
        target_layer_ids=fields.layer_ids("target_layer_ids"),
        num_target_layers=fields.integer("num_target_layers", target.num_layers),
        target_hidden_size=fields.integer("target_hidden_size", backbone.hidden_size),
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        markov_head=head,
        markov_rank=rank,
        confidence=confidence,
        confidence_with_markov=with_markov,
        draft_vocab_size=fields.integer("draft_vocab_size", backbone.vocab_size),
    )


def _markov_head(fields: Fields, rank: int) -> MarkovHead:
    if rank == 0:
        return "none"
    name = str(fields.values.get("markov_head_type")).lower()
    for head in get_args(MarkovHead):
        if head == name != "none":
            return head  # type: ignore[no-any-return]
    raise CheckpointError(f"{fields.path}: markov_head_type is {name!r}, expected vanilla, gated or rnn")


def check_fit(path: Path, config: DrafterConfig, target: ModelConfig) -> None:
    """Refuse a drafter that was trained for another target.

    Raises:
        CheckpointError: it was.
    """

    def expect(what: str, target_has: int, drafter_has: int) -> None:
        if target_has != drafter_has:
            raise CheckpointError(
                f"{path}: the drafter was trained for a target with {what} {drafter_has}, this one has {target_has}; "
                "pass the target it was trained for"
            )

    expect("vocab_size", target.vocab_size, config.backbone.vocab_size)
    expect("hidden_size", target.hidden_size, config.target_hidden_size)
    expect("num_hidden_layers", target.num_layers, config.num_target_layers)
    _check_layer_ids(path, config, target)
    if config.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"{path}: mask_token_id is {config.mask_token_id}, outside the vocabulary of {target.vocab_size}"
        )
    if config.draft_vocab_size > target.vocab_size:
        raise CheckpointError(
            f"{path}: draft_vocab_size is {config.draft_vocab_size}, larger than the target's {target.vocab_size}"
        )


def _check_layer_ids(path: Path, config: DrafterConfig, target: ModelConfig) -> None:
    last = target.num_layers - 1
    # Only an MTP head reads what the target's own output head reads.
    highest = last if config.kind == "mtp" else last - 1
    previous = -1
    for layer in config.target_layer_ids:
        if layer == -1:
            raise CheckpointError(f"{path}: target_layer_ids names -1 (the embedding output), which is not supported")
        if layer == last > highest:
            raise CheckpointError(
                f"{path}: target_layer_ids names {last}, the target's last layer, which cannot be a feature; "
                f"expected layers 0 to {highest}"
            )
        if not 0 <= layer <= highest:
            raise CheckpointError(f"{path}: target_layer_ids names {layer}, expected layers 0 to {highest}")
        if layer <= previous:
            raise CheckpointError(f"{path}: target_layer_ids {list(config.target_layer_ids)} must increase strictly")
        previous = layer


def refuse_tied_to_target(path: Path, target: ModelConfig) -> None:
    """Refuse a tied head without tables of its own where the target's head is not its embedding.

    Raises:
        CheckpointError: the drafter's head would be the target's embedding, and shared heads are the target's head.
    """
    if not target.tie_word_embeddings:
        raise CheckpointError(
            f"{path}: tie_word_embeddings is true, but the drafter has no embedding of its own and the target's head "
            "is not tied; set tie_word_embeddings to false if the drafter was trained with the target's head"
        )


def _map_drafter(mapper: TensorMapper, config: DrafterConfig, target: ModelConfig, fields: Fields) -> None:
    path, tied = fields.path, fields.boolean("tie_word_embeddings", False)
    size, rank = config.backbone.hidden_size, config.markov_rank
    vocab, draft_vocab = target.vocab_size, config.draft_vocab_size
    mapper.take_layers(config.backbone)
    mapper.take("fc.weight", "fc.weight", (size, config.feature_size))
    mapper.take("hidden_norm.weight", "hidden_norm.weight", (size,))
    mapper.take("norm.weight", "norm.weight", (size,))
    reduced = draft_vocab != vocab
    own_embed, own_head = "embed_tokens.weight" in mapper, "lm_head.weight" in mapper
    for name, rows in (("embed_tokens.weight", vocab), ("lm_head.weight", draft_vocab)):
        if name in mapper:
            mapper.take(name, name.replace("embed_tokens", "embed"), (rows, size))
        elif name == "lm_head.weight" and tied and own_embed and not reduced:
            mapper.alias("embed.weight", "lm_head.weight")
        elif size != target.hidden_size or (reduced and name == "lm_head.weight"):
            raise CheckpointError(f"{path.parent} lacks tensor {name}, and the target's does not fit this drafter")
    if tied and not own_embed and not own_head:
        refuse_tied_to_target(path, target)
    if reduced:
        chosen = mapper.drop("t2d")
        mapper.take("d2t", "d2t", (draft_vocab,), lambda values: _absolute_ids(values, vocab, chosen, path))
    if config.markov_head != "none":
        mapper.take("markov_head.markov_w1.weight", "markov.w1.weight", (vocab, rank))
        mapper.take("markov_head.markov_w2.weight", "markov.w2.weight", (draft_vocab, rank))
    if config.markov_head == "gated":
        _take_linear(mapper, "markov_head.gate_proj", "markov.gate", (rank, size + rank))
    if config.markov_head == "rnn":
        _take_linear(mapper, "markov_head.joint_proj", "markov.rnn", (3 * rank, 2 * rank + size))
    if config.confidence:
        width = size + rank if config.confidence_with_markov else size
        source = "confidence_head.proj.weight"
        mapper.take(source, "confidence.weight", (width,), lambda values: values.reshape(width), (1, width))
        if "confidence_head.proj.bias" in mapper:
            mapper.take("confidence_head.proj.bias", "confidence.bias", (1,))


def drafter_shapes(config: DrafterConfig, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a drafter's own tensors: all but the tables it shares with its target."""
    size, rank, vocab = config.backbone.hidden_size, config.markov_rank, target.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, config.feature_size)}
    shapes |= {"hidden_norm.weight": (size,), "norm.weight": (size,)}
    for layer in range(config.backbone.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(config.backbone).items()}
    if size != target.hidden_size:
        shapes["embed.weight"] = (vocab, size)
    if size != target.hidden_size or config.draft_vocab_size != vocab:
        shapes["lm_head.weight"] = (config.draft_vocab_size, size)
    if config.markov_head != "none":
        shapes |= {"markov.w1.weight": (vocab, rank), "markov.w2.weight": (config.draft_vocab_size, rank)}
    heads = {"gated": ("markov.gate", (rank, size + rank)), "rnn": ("markov.rnn", (3 * rank, 2 * rank + size))}
    if config.markov_head in heads:
        name, shape = heads[config.markov_head]
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    if config.confidence:
        width = size + rank if config.confidence_with_markov else size
        shapes |= {"confidence.weight": (width,), "confidence.bias": (1,)}
    return shapes


def _take_linear(mapper: TensorMapper, source: str, canonical: str, shape: tuple[int, int]) -> None:
    mapper.take(f"{source}.weight", f"{canonical}.weight", shape)
    if f"{source}.bias" in mapper:
        mapper.take(f"{source}.bias", f"{canonical}.bias", shape[:1])


def _absolute_ids(offsets: Array, vocab: int, chosen: LazyArray | None, path: Path) -> Array:
    """Turn stored offsets (target id - draft id) into distinct target ids.

    Absolute ids read as offsets can pass for valid ones, so `t2d`, the mask of chosen ids, is compared if present.
    """
    if offsets.dtype.kind != "i":
        raise CheckpointError(f"{path.parent}: tensor d2t has dtype {offsets.dtype}, expected integers")
    ids = offsets.astype(np.int64) + np.arange(offsets.size)
    if ids.min() < 0 or ids.max() >= vocab or np.unique(ids).size != ids.size:
        raise CheckpointError(
            f"{path.parent}: tensor d2t does not map to distinct ids below {vocab}; "
            "it must hold offsets (target id minus draft id)"
        )
    if chosen is not None and not np.array_equal(np.flatnonzero(chosen.load()), np.sort(ids)):
        raise CheckpointError(f"{path.parent}: tensors d2t and t2d choose different target ids; the drafter is damaged")
    return ids
