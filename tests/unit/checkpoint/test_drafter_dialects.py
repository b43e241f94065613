"""speculators and SpecForge drafters: the same drafter in three layouts reads the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafter_dialects import DRAFT_IDS, HEAD_FIELDS, reduced_tensors, specforge_config, speculators_config
from helpers.tiny_models import drafter_config, drafter_tensors, write_directory, write_target

from trtllm_dspark.checkpoint import ModelConfig, load_drafter, load_target, spread_draft_vocab
from trtllm_dspark.errors import CheckpointError


@pytest.fixture(scope="module")
def target_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_target(write_target(tmp_path_factory.mktemp("target"))).config


def _assert_same_drafter(directory: Path, target: ModelConfig, reference: Path, dialect: str) -> None:
    drafter, expected = load_drafter(directory, target), load_drafter(reference, target)
    assert drafter.format == dialect
    assert drafter.config == expected.config
    assert drafter.arrays.keys() == expected.arrays.keys()
    for name in expected.arrays:
        np.testing.assert_array_equal(drafter.arrays[name], expected.arrays[name])


def test_specforge_drafter_equals_deepspec_one(tmp_path: Path, target_config: ModelConfig) -> None:
    tensors = drafter_tensors(drafter_config(), seed=4)
    reference = write_directory(tmp_path / "deepspec", drafter_config(), tensors)
    nested = write_directory(tmp_path / "nested", specforge_config(), tensors)
    _assert_same_drafter(nested, target_config, reference, "specforge")
    # Normalised exports repeat the fields at the top level and rename the class.
    flat = {name: drafter_config()[name] for name in HEAD_FIELDS}
    repeated = specforge_config(architectures=["Qwen3DSparkModel"], **flat)
    _assert_same_drafter(write_directory(tmp_path / "flat", repeated, tensors), target_config, reference, "specforge")


@pytest.mark.parametrize(
    "renamed",
    [
        {"markov_head.": "logit_head.markov_head.", "confidence_head.": "logit_head.confidence_head."},
        {"markov_head.": "", "confidence_head.proj.": "confidence_proj."},
    ],
)
def test_specforge_older_tensor_names_are_understood(
    tmp_path: Path, target_config: ModelConfig, renamed: dict[str, str]
) -> None:
    tensors = drafter_tensors(drafter_config(), seed=4)
    reference = write_directory(tmp_path / "deepspec", drafter_config(), tensors)
    older = {}
    for name, values in tensors.items():
        prefix = next((old for old in renamed if name.startswith(old)), "")
        older[renamed.get(prefix, "") + name[len(prefix) :]] = values
    assert older.keys() != tensors.keys()
    directory = write_directory(tmp_path / "older", specforge_config(), older)
    _assert_same_drafter(directory, target_config, reference, "specforge")
    twice = write_directory(tmp_path / "twice", specforge_config(), {**tensors, **older})
    with pytest.raises(CheckpointError, match="under two names"):
        load_drafter(twice, target_config)


def test_specforge_defaults_are_no_heads(tmp_path: Path, target_config: ModelConfig) -> None:
    config = specforge_config()
    for name in (*HEAD_FIELDS, "confidence_head_alpha", "projector_type"):
        del config["dflash_config"][name]
    bare = drafter_config(markov_rank=0, markov_head_type=None, enable_confidence_head=False)
    write_directory(tmp_path, config, drafter_tensors(bare, seed=4))
    drafter = load_drafter(tmp_path, target_config).config
    assert (drafter.markov_head, drafter.confidence) == ("none", False)


def test_specforge_old_name_of_confidence_switch_is_read(tmp_path: Path, target_config: ModelConfig) -> None:
    config = specforge_config({"use_confidence_head": True})
    del config["dflash_config"]["enable_confidence_head"]
    write_directory(tmp_path, config, drafter_tensors(drafter_config(), seed=4))
    assert load_drafter(tmp_path, target_config).config.confidence


@pytest.mark.parametrize(
    ("nested", "overrides", "message"),
    [
        ({}, {"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel is not supported"),
        ({}, {"model_type": "lfm2"}, "model_type is 'lfm2'"),
        ({"projector_type": "domino"}, {}, "projector_type is 'domino'"),
        ({"attention_mode": "mla"}, {}, "attention_mode is 'mla'"),
        ({"shift_label": False}, {}, "shift_label is False"),
        ({"causal": True}, {}, "causal is True"),
        ({"use_swa": True, "swa_window_size": 2048}, {}, "use_swa is True"),
        ({"pure_draft_prefix_len": 2}, {}, "pure_draft_prefix_len is 2"),
        ({"gru_hidden_dim": 8}, {}, r"dflash_config\.gru_hidden_dim = 8 is not known"),
        ({"projector_type": None}, {"projector_type": "domino"}, "projector_type is 'domino'; this form"),
        ({"attention_mode": None}, {"attention_mode": "mla"}, "attention_mode is 'mla'; this form"),
        ({}, {"shift_label": False}, "shift_label is False; this form"),
        ({}, {"causal": True}, "causal is True; this form"),
        ({}, {"use_swa": True}, "use_swa is True; this form"),
        ({}, {"pure_draft_prefix_len": 2}, "pure_draft_prefix_len is 2; this form"),
        ({}, {"logit_scale": 2.0}, r"field logit_scale = 2\.0 is not known"),
        ({}, {"markov_rank": 16}, r"markov_rank is 16 and dflash_config\.markov_rank is 32"),
        ({}, {"dflash_config": [1]}, r"dflash_config is \[1\]"),
        ({"target_layer_ids": [1, 3]}, {}, "the target's last layer"),
    ],
)
def test_specforge_other_maths_is_refused_by_name(
    tmp_path: Path, target_config: ModelConfig, nested: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    config = specforge_config(nested, **overrides)
    write_directory(tmp_path, config, drafter_tensors(drafter_config(), seed=4))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, target_config)


def test_speculators_drafter_equals_deepspec_one(tmp_path: Path, target_config: ModelConfig) -> None:
    tensors = drafter_tensors(drafter_config(), seed=4, own_embed=True, own_lm_head=True)
    reference = write_directory(tmp_path / "deepspec", drafter_config(), tensors)
    directory = write_directory(tmp_path / "speculators", speculators_config(), tensors)
    _assert_same_drafter(directory, target_config, reference, "speculators")


@pytest.mark.parametrize("where", [{"nested": {"tie_word_embeddings": True}}, {"tie_word_embeddings": True}])
def test_speculators_tied_head_is_the_drafters_embedding(
    tmp_path: Path, target_config: ModelConfig, where: dict[str, Any]
) -> None:
    tensors = drafter_tensors(drafter_config(), seed=4, own_embed=True)
    write_directory(tmp_path, speculators_config(**where), tensors)
    arrays = load_drafter(tmp_path, target_config).arrays
    np.testing.assert_array_equal(arrays["lm_head.weight"], tensors["embed_tokens.weight"])


def test_speculators_reduced_vocabulary_offsets_become_target_ids(tmp_path: Path, target_config: ModelConfig) -> None:
    write_directory(tmp_path, speculators_config(draft_vocab_size=len(DRAFT_IDS)), reduced_tensors())

    drafter = load_drafter(tmp_path, target_config)

    assert drafter.config.draft_vocab_size == len(DRAFT_IDS)
    assert drafter.arrays["d2t"].dtype == np.int64
    np.testing.assert_array_equal(drafter.arrays["d2t"], DRAFT_IDS)
    assert drafter.arrays.shape("markov.w1.weight") == (192, 32)
    assert drafter.arrays.shape("markov.w2.weight") == (len(DRAFT_IDS), 32)
    assert drafter.arrays.shape("lm_head.weight") == (len(DRAFT_IDS), 64)


def test_spread_draft_vocab_puts_rows_at_their_target_ids(tmp_path: Path, target_config: ModelConfig) -> None:
    write_directory(tmp_path / "reduced", speculators_config(draft_vocab_size=len(DRAFT_IDS)), reduced_tensors())
    reduced = load_drafter(tmp_path / "reduced", target_config)

    full, ids = spread_draft_vocab(reduced)

    assert ids is not None
    np.testing.assert_array_equal(ids, DRAFT_IDS)
    assert full.config.draft_vocab_size == 192
    assert full.arrays.keys() == reduced.arrays.keys() - {"d2t"}
    for name in ("markov.w2.weight", "lm_head.weight"):
        rows = full.arrays[name]
        np.testing.assert_array_equal(rows[ids], reduced.arrays[name])
        assert not np.delete(rows, ids, axis=0).any()
    np.testing.assert_array_equal(full.arrays["markov.w1.weight"], reduced.arrays["markov.w1.weight"])
    whole = load_drafter(
        write_directory(tmp_path / "whole", drafter_config(), drafter_tensors(drafter_config(), seed=4)), target_config
    )
    assert spread_draft_vocab(whole) == (whole, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": None}, "lacks tensor d2t"),
        ({"lm_head.weight": None}, r"lacks tensor lm_head\.weight"),
        ({"d2t": DRAFT_IDS}, "distinct ids below 192"),
        ({"d2t": -np.arange(len(DRAFT_IDS))}, "distinct ids below 192"),
        ({"d2t": DRAFT_IDS[1:]}, r"d2t .* has shape \[63\].* \[64\]"),
        ({"d2t": np.ones(len(DRAFT_IDS), np.bool_)}, "d2t has dtype bool"),
        ({"d2t": np.zeros(len(DRAFT_IDS), np.int64)}, "d2t and t2d choose different target ids"),
    ],
)
def test_speculators_bad_vocabulary_map_is_refused(
    tmp_path: Path, target_config: ModelConfig, changes: dict[str, Any], message: str
) -> None:
    write_directory(tmp_path, speculators_config(draft_vocab_size=len(DRAFT_IDS)), reduced_tensors(**changes))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, target_config).arrays["d2t"]


def test_speculators_left_out_fields_take_the_library_defaults(tmp_path: Path, target_config: ModelConfig) -> None:
    config = speculators_config({"head_dim": 128, "rms_norm_eps": 1e-6})
    for name in ("markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "block_size"):
        del config[name]
    for name in ("head_dim", "rms_norm_eps"):
        del config["transformer_layer_config"][name]
    write_directory(tmp_path, config, drafter_tensors(drafter_config(head_dim=128), seed=4))
    drafter = load_drafter(tmp_path, target_config).config
    assert (drafter.block_size, drafter.markov_head, drafter.confidence_with_markov) == (8, "vanilla", True)
    assert (drafter.backbone.head_dim, drafter.backbone.rms_norm_eps) == (128, 1e-6)


def test_speculators_tensors_of_training_are_left_out(tmp_path: Path, target_config: ModelConfig) -> None:
    tensors = drafter_tensors(drafter_config(), seed=4)
    extra = {"verifier_norm.weight": np.ones(64, np.float32), "verifier_lm_head.weight": np.ones((192, 64), np.float32)}
    write_directory(tmp_path, speculators_config(), {**tensors, **extra})
    assert len(load_drafter(tmp_path, target_config).arrays) == len(tensors)


def test_speculators_embedding_never_filled_is_refused_when_read(tmp_path: Path, target_config: ModelConfig) -> None:
    tensors = drafter_tensors(drafter_config(), seed=4)
    write_directory(
        tmp_path, speculators_config(), {**tensors, "embed_tokens.weight": np.full((192, 64), np.nan, "f4")}
    )
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight holds NaN"):
        load_drafter(tmp_path, target_config).arrays["embed.weight"]


@pytest.mark.parametrize(
    ("nested", "overrides", "message"),
    [
        ({}, {"speculators_model_type": "eagle3"}, "'eagle3', expected 'dspark'"),
        ({}, {"sample_from_anchor": None}, "has no sample_from_anchor"),
        ({}, {"sample_from_anchor": False}, "sample_from_anchor is false"),
        ({}, {"aux_hidden_state_layer_ids": [0, 3]}, "names 0 .the embedding output is 0."),
        ({}, {"aux_hidden_state_layer_ids": [1, 4]}, "names 3, the target's last layer"),
        ({}, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
        ({}, {"transformer_layer_config": None}, "transformer_layer_config is None"),
        ({"model_type": "llama"}, {}, "model_type is 'llama'"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "sliding_attention"),
        ({"query_scale": 2}, {}, "field query_scale = 2 is not known"),
        ({}, {"head_scale": 2}, "field head_scale = 2 is not known"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ({}, {"mask_token_id": None}, "has no mask_token_id"),
    ],
)
def test_speculators_other_maths_is_refused_by_name(
    tmp_path: Path, target_config: ModelConfig, nested: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    config = speculators_config(nested, **overrides)
    write_directory(tmp_path, config, drafter_tensors(drafter_config(), seed=4))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, target_config)
