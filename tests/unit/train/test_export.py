"""What a trained drafter looks like on disk: DeepSpec's names, shapes and fields."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.training import train

from trtllm_dspark.checkpoint import Checkpoint, load_drafter, share_equal_tensors
from trtllm_dspark.checkpoint.safetensors_io import read_file
from trtllm_dspark.errors import CheckpointError, ConfigError
from trtllm_dspark.train.pipeline import TrainConfig
from trtllm_dspark.train.responses import Response

V, D, INNER, HEADS, KV, SIZE, RANK = 256, 64, 128, 4, 2, 16, 8
BACKBONE = {
    "fc.weight": (D, 2 * D),
    "hidden_norm.weight": (D,),
    "norm.weight": (D,),
    "layers.0.input_layernorm.weight": (D,),
    "layers.0.post_attention_layernorm.weight": (D,),
    "layers.0.self_attn.q_proj.weight": (HEADS * SIZE, D),
    "layers.0.self_attn.k_proj.weight": (KV * SIZE, D),
    "layers.0.self_attn.v_proj.weight": (KV * SIZE, D),
    "layers.0.self_attn.o_proj.weight": (D, HEADS * SIZE),
    "layers.0.self_attn.q_norm.weight": (SIZE,),
    "layers.0.self_attn.k_norm.weight": (SIZE,),
    "layers.0.mlp.gate_proj.weight": (INNER, D),
    "layers.0.mlp.up_proj.weight": (INNER, D),
    "layers.0.mlp.down_proj.weight": (D, INNER),
}
MARKOV = {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (V, RANK)}
WITH_MARKOV = {"confidence_head.proj.weight": (1, D + RANK), "confidence_head.proj.bias": (1,)}
HEAD_TENSORS = {
    "none": {"confidence_head.proj.weight": (1, D), "confidence_head.proj.bias": (1,)},
    "vanilla": MARKOV | WITH_MARKOV,
    "gated": MARKOV
    | WITH_MARKOV
    | {"markov_head.gate_proj.weight": (RANK, D + RANK), "markov_head.gate_proj.bias": (RANK,)},
    "rnn": MARKOV
    | WITH_MARKOV
    | {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + D), "markov_head.joint_proj.bias": (3 * RANK,)},
}
# What Qwen3DSparkModel and its Qwen3 base read from config.json.
FIELDS = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "attention_bias": False,
    "layer_types": ["full_attention"],
    "pad_token_id": 2,
    "num_target_layers": 4,
    "target_layer_ids": [0, 2],
    "block_size": 5,
    "num_anchors": 4,
    "enable_confidence_head": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("head", sorted(HEAD_TENSORS))
def test_names_shapes_and_fields_are_deepspecs(
    config: TrainConfig, responses: list[Response], target: Checkpoint, head: str
) -> None:
    config = replace(config, markov_head=head, steps=1)  # type: ignore[arg-type]
    train(config, responses)
    path = config.output_dir / "drafter"
    stored = read_file(path / "model.safetensors")
    assert {name: entry.shape for name, entry in stored.items()} == BACKBONE | HEAD_TENSORS[head]
    assert {entry.dtype for entry in stored.values()} == {"F16"}
    fields = json.loads((path / "config.json").read_text("utf-8"))
    assert {name: fields[name] for name in FIELDS} == FIELDS
    assert fields["markov_rank"] == (0 if head == "none" else RANK)
    assert fields["confidence_head_with_markov"] is (head != "none")
    assert load_drafter(path, target.config).config.markov_head == head


def test_copies_of_the_targets_tables_are_its_own(
    config: TrainConfig, responses: list[Response], target: Checkpoint
) -> None:
    train(config, responses, steps=1, include_shared=True)
    drafter = load_drafter(config.output_dir / "drafter", target.config)
    for name in ("embed.weight", "lm_head.weight"):
        np.testing.assert_array_equal(drafter.arrays[name], target.arrays[name].astype(np.float16).astype(np.float32))
    assert share_equal_tensors(drafter, target).arrays.shape("fc.weight") == (D, 2 * D)


def test_reduced_vocabulary_leaves_the_other_rows_alone(
    config: TrainConfig, responses: list[Response], target: Checkpoint, tmp_path: Path
) -> None:
    train(config, responses, steps=1)
    first = config.output_dir / "drafter"
    counts = tmp_path / "counts.json"
    pairs = [[token, 1000 - token] for token in range(4, 100)]
    document = {"schema": "trtllm_dspark.token_counts", "schema_version": 1, "vocab_size": V, "counts": pairs}
    counts.write_text(json.dumps(document), "utf-8")
    train(
        config,
        responses,
        steps=2,
        output_dir=tmp_path / "more",
        init_from=str(first),
        draft_vocab_size=80,
        draft_vocab_counts=counts,
    )
    name = "markov.w2.weight"
    old, new = (load_drafter(path, target.config).arrays[name] for path in (first, tmp_path / "more" / "drafter"))
    changed = np.flatnonzero((old != new).any(-1))
    assert changed.size > 0
    assert set(changed) <= {0, 1, 2, *range(4, 84)}


def test_init_share_averages_what_is_written_and_nothing_else(
    config: TrainConfig, responses: list[Response], target: Checkpoint, tmp_path: Path
) -> None:
    train(config, responses, steps=1)
    first = config.output_dir / "drafter"
    for name, share in (("alone", 0.0), ("mixed", 0.25)):
        train(config, responses, steps=2, output_dir=tmp_path / name, init_from=str(first), init_share=share)
    start, alone, mixed = (
        load_drafter(path, target.config).arrays
        for path in (first, tmp_path / "alone/drafter", tmp_path / "mixed/drafter")
    )
    for name in alone:
        average = 0.75 * alone[name].astype(np.float32) + 0.25 * start[name].astype(np.float32)
        np.testing.assert_allclose(mixed[name], average, rtol=2e-3, atol=1e-6, err_msg=name)
    assert any((mixed[name] != alone[name]).any() for name in alone)
    # The run itself goes on from the trained weights.
    logs = [(tmp_path / name / "training_log.csv").read_text().splitlines() for name in ("alone", "mixed")]
    losses = [[line.split(",")[2:7] for line in log] for log in logs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("flags", "said"), [({"init_share": 0.5}, "give both"), ({"init_share": 1.0}, "below 1")])
def test_init_share_without_a_start_is_refused(config: TrainConfig, flags: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(config, **flags)


def test_unknown_field_is_refused(config: TrainConfig, responses: list[Response], target: Checkpoint) -> None:
    train(config, responses, steps=1)
    path = config.output_dir / "drafter" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "attention_sinks": 4}), "utf-8")
    with pytest.raises(CheckpointError, match="attention_sinks"):
        load_drafter(path.parent, target.config)
