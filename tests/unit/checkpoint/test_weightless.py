"""Models known by their configuration alone: the released pairs, and what such a description refuses."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
from helpers import drafter_dialects, tiny_models

from trtllm_dspark.build.estimate import count_drafter_parameters, count_parameters
from trtllm_dspark.checkpoint import describe_drafter, describe_target, has_weights, load_drafter, load_target
from trtllm_dspark.errors import CheckpointError

RELEASED = Path(__file__).parents[2] / "fixtures" / "released_configs"
# As the model cards say: 4.0 B, 8.2 B and 14.8 B.
PARAMETERS = {"4b": 4_022_468_096, "8b": 8_190_735_360, "14b": 14_768_307_200}


@pytest.mark.parametrize("size", PARAMETERS)
def test_released_pair_has_its_known_parameters(size: str) -> None:
    target = describe_target(RELEASED / f"qwen3_{size}")
    drafter = describe_drafter(RELEASED / f"dspark_qwen3_{size}_block7" / "config.json", target.config)
    assert sum(prod(target.arrays.shape(name)) for name in target.arrays) == PARAMETERS[size]
    assert count_parameters(target.config) == PARAMETERS[size]
    own = sum(prod(drafter.arrays.shape(name)) for name in drafter.arrays)
    assert count_drafter_parameters(drafter.config) == own
    assert drafter.arrays.shape("confidence.weight") == (target.config.hidden_size + 256,)
    assert (drafter.config.block_size, drafter.config.mask_token_id) == (7, 151669)
    assert drafter.shares_embedding
    assert drafter.shares_lm_head


@pytest.mark.parametrize("markov_head", ["none", "vanilla", "gated", "rnn"])
def test_description_has_the_tensors_of_the_checkpoint(markov_head: str, tmp_path: Path) -> None:
    path = tiny_models.write_target(tmp_path / "t")
    target = load_target(path)
    described = describe_target(path)
    assert described.config == target.config
    assert {name: described.arrays.shape(name) for name in described.arrays} == {
        name: target.arrays.shape(name) for name in target.arrays
    }
    directory = tiny_models.write_drafter(
        tmp_path / "d", markov_head=markov_head, confidence_with_markov=markov_head != "none"
    )
    drafter, sketch = load_drafter(directory, target.config), describe_drafter(directory, target.config)
    assert sketch.config == drafter.config
    assert {name: sketch.arrays.shape(name) for name in sketch.arrays} == {
        name: drafter.arrays.shape(name) for name in drafter.arrays
    }
    count = sum(prod(drafter.arrays.shape(name)) for name in drafter.arrays)
    assert count_drafter_parameters(drafter.config) == count


def test_description_of_a_reduced_vocabulary_knows_its_size(tmp_path: Path) -> None:
    target = describe_target(tiny_models.write_target(tmp_path / "t"))
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(drafter_dialects.speculators_config(draft_vocab_size=64)))
    drafter = describe_drafter(directory, target.config)
    assert drafter.arrays.shape("lm_head.weight")[0] == 64
    assert not drafter.shares_lm_head


def test_description_has_no_values_and_says_so() -> None:
    target = describe_target(RELEASED / "qwen3_8b")
    with pytest.raises(CheckpointError, match="qwen3_8b has no weights; give the whole model"):
        target.arrays["embed.weight"]


def test_has_weights_tells_models_from_configurations(tmp_path: Path) -> None:
    assert has_weights(tiny_models.write_target(tmp_path / "t"))
    assert not has_weights(RELEASED / "qwen3_8b")
    assert not has_weights(RELEASED / "qwen3_8b" / "config.json")


def test_other_files_and_other_pairs_are_refused(tmp_path: Path) -> None:
    target = describe_target(RELEASED / "qwen3_8b")
    with pytest.raises(CheckpointError, match="is not a model's config.json; give that file or its directory"):
        describe_target(tmp_path)
    with pytest.raises(CheckpointError, match="trained for a target with hidden_size 2560, this one has 4096"):
        describe_drafter(RELEASED / "dspark_qwen3_4b_block7", target.config)
    with pytest.raises(CheckpointError, match="Qwen3DSparkModel is not supported as a target"):
        describe_target(RELEASED / "dspark_qwen3_8b_block7")


def test_configuration_that_is_a_directory_is_an_unreadable_checkpoint(tmp_path: Path) -> None:
    target = load_target(tiny_models.write_target(tmp_path / "t"))
    drafter = tiny_models.write_drafter(tmp_path / "d")
    (drafter / "config.json").unlink()
    (drafter / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="config.json cannot be read .Is a directory."):
        load_drafter(drafter, target.config)
