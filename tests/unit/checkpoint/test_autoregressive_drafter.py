"""Autoregressive drafters are read in full or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.autoregressive import KINDS, change_config, write_autoregressive_drafter
from helpers.tiny_models import write_target

from trtllm_dspark.checkpoint import describe_drafter, load_drafter, load_target
from trtllm_dspark.checkpoint.autoregressive import autoregressive_shapes
from trtllm_dspark.checkpoint.config import DrafterKind, ModelConfig
from trtllm_dspark.errors import CheckpointError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_target(write_target(tmp_path_factory.mktemp("target"))).config


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_mapped(target: ModelConfig, tmp_path: Path, kind: DrafterKind) -> None:
    drafter = load_drafter(write_autoregressive_drafter(tmp_path, kind), target)
    assert drafter.config.kind == drafter.format == kind
    assert drafter.config.autoregressive
    assert {name: drafter.arrays[name].shape for name in drafter.arrays} == autoregressive_shapes(drafter.config)
    assert drafter.shares_embedding
    assert drafter.shares_lm_head
    described = describe_drafter(tmp_path / "config.json", target)
    assert described.config == drafter.config
    assert set(described.arrays) == set(drafter.arrays)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("eagle3", {"markov_rank": 8}, "field markov_rank = 8 is not known"),
        ("eagle3", {"norm_before_residual": True}, "field norm_before_residual = True is not known"),
        ("mtp", {"residual_scale": 0.5}, "field residual_scale = 0.5 is not known"),
        ("eagle3", {"draft_vocab_size": 100}, "field draft_vocab_size"),
        ("eagle3", {"hidden_act": "gelu"}, "this activation is not supported"),
        ("eagle3", {"num_hidden_layers": 2}, "has one layer"),
        ("mtp", {"tie_word_embeddings": True}, "the target's head is not tied"),
        ("mtp", {"block_size": 2}, "a block_size of 1"),
        ("mtp", {"target_layer_ids": [1, 3]}, "one layer in target_layer_ids"),
        ("eagle3", {"target_layer_ids": [1, 3]}, "the target's last layer, which cannot be a feature"),
        ("eagle3", {"target_layer_ids": [2, 1]}, "must increase strictly"),
        ("mtp", {"target_layer_ids": [4]}, "expected layers 0 to 3"),
        ("eagle3", {"num_target_layers": 9}, "trained for a target with num_hidden_layers 9"),
        ("eagle3", {"hidden_size": 32, "head_dim": 16}, "whose embedding and output head it shares"),
        ("eagle3", {"intermediate_size": 64}, "its configuration calls for"),
        ("eagle3", {"architectures": ["Eagle4"]}, "Qwen3Eagle3Drafter or Qwen3MtpDrafter"),
        ("eagle3", {"architectures": ["Qwen3MtpDrafter"]}, "an MTP-1 head has one layer"),
    ],
)
def test_what_changes_the_maths_is_refused(
    target: ModelConfig, tmp_path: Path, kind: DrafterKind, fields: dict[str, Any], message: str
) -> None:
    write_autoregressive_drafter(tmp_path, kind)
    change_config(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, target)
