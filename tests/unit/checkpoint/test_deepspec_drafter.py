from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny_models import drafter_config, drafter_tensors, write_directory, write_drafter, write_target

from trtllm_dspark.checkpoint import ModelConfig, load_drafter, load_target, share_equal_tensors
from trtllm_dspark.checkpoint.int8_rows import quantise_rows
from trtllm_dspark.checkpoint.safetensors_io import read_directory, write_file
from trtllm_dspark.errors import CheckpointError


@pytest.fixture(scope="module")
def target_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_target(write_target(tmp_path_factory.mktemp("target"))).config


def _tensors(directory: Path) -> dict[str, Any]:
    return {name: tensor.read() for name, tensor in read_directory(directory)[0].items()}


@pytest.mark.parametrize("markov_head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confidence", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_load_drafter_every_tensor_has_its_canonical_name(
    tmp_path: Path, target_config: ModelConfig, markov_head: Any, confidence: bool, own: bool
) -> None:
    write_drafter(tmp_path, markov_head=markov_head, confidence=confidence, own_embed=own, own_lm_head=own)
    stored = _tensors(tmp_path)

    drafter = load_drafter(tmp_path, target_config)

    config = drafter.config
    assert (config.markov_head, config.markov_rank) == (markov_head, 0 if markov_head == "none" else 32)
    assert (config.confidence, config.confidence_with_markov) == (confidence, confidence and markov_head != "none")
    assert (drafter.shares_embedding, drafter.shares_lm_head) == (not own, not own)
    assert {drafter.arrays.source_name(name) for name in drafter.arrays} == stored.keys()
    assert len(drafter.arrays) == len(stored)
    for name, values in drafter.arrays.items():
        np.testing.assert_array_equal(values, stored[drafter.arrays.source_name(name)].reshape(values.shape))


def test_load_drafter_head_names_and_shapes(tmp_path: Path, target_config: ModelConfig) -> None:
    shapes = {}
    for head in ("gated", "rnn"):
        arrays = load_drafter(write_drafter(tmp_path / head, markov_head=head), target_config).arrays
        shapes |= {name: arrays.shape(name) for name in arrays if not name.startswith("layers")}
    assert shapes == {
        "fc.weight": (64, 128),
        "hidden_norm.weight": (64,),
        "norm.weight": (64,),
        "markov.w1.weight": (192, 32),
        "markov.w2.weight": (192, 32),
        "markov.gate.weight": (32, 96),
        "markov.gate.bias": (32,),
        "markov.rnn.weight": (96, 128),
        "markov.rnn.bias": (96,),
        "confidence.weight": (96,),
        "confidence.bias": (1,),
    }


def test_load_drafter_confidence_without_markov_has_hidden_width(tmp_path: Path, target_config: ModelConfig) -> None:
    drafter = load_drafter(write_drafter(tmp_path, confidence_with_markov=False), target_config)
    assert drafter.arrays.shape("confidence.weight") == (64,)


def test_load_drafter_optional_biases_may_be_absent(tmp_path: Path, target_config: ModelConfig) -> None:
    write_drafter(tmp_path, markov_head="gated")
    tensors = {name: values for name, values in _tensors(tmp_path).items() if "bias" not in name}
    write_file(tmp_path / "model.safetensors", tensors)
    arrays = load_drafter(tmp_path, target_config).arrays
    assert not [name for name in arrays if "bias" in name]


def test_load_drafter_layer_ids_are_kept_as_layer_outputs(tmp_path: Path, target_config: ModelConfig) -> None:
    config = load_drafter(write_drafter(tmp_path, target_layer_ids=[0, 1, 2]), target_config).config
    assert config.target_layer_ids == (0, 1, 2)
    assert config.feature_size == 3 * 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel is not supported"),
        ({"vocab_size": 256}, "vocab_size 256, this one has 192"),
        ({"target_hidden_size": 128}, "hidden_size 128, this one has 64"),
        ({"num_target_layers": 6}, "num_hidden_layers 6, this one has 4"),
        ({"target_layer_ids": [0, 3]}, "names 3, the target's last layer.*expected layers 0 to 2"),
        ({"target_layer_ids": [0, 4]}, "names 4, expected layers 0 to 2"),
        ({"target_layer_ids": [-1, 2]}, "names -1 .the embedding output., which is not supported"),
        ({"target_layer_ids": [2, 0]}, r"\[2, 0\] must increase strictly"),
        ({"target_layer_ids": [1, 1]}, r"\[1, 1\] must increase strictly"),
        ({"target_layer_ids": []}, r"target_layer_ids is \[\]"),
        ({"target_layer_ids": [0, 1, 2]}, r"fc\.weight .* has shape \[64, 128\].* \[64, 192\]"),
        ({"mask_token_id": 192}, "mask_token_id is 192, outside the vocabulary of 192"),
        ({"mask_token_id": None}, "has no mask_token_id"),
        ({"block_size": 0}, "block_size is 0"),
        ({"markov_head_type": "gru"}, "markov_head_type is 'gru', expected vanilla, gated or rnn"),
        ({"markov_head_type": None}, "markov_head_type is 'none'"),
        ({"markov_rank": 16}, r"markov_w1\.weight .* has shape \[192, 32\].* \[192, 16\]"),
        ({"markov_rank": 0}, "confidence_head_with_markov is true but markov_rank is 0"),
        ({"markov_head_type": "gated"}, r"lacks tensor markov_head\.gate_proj\.weight"),
        ({"enable_confidence_head": False}, r"holds tensor confidence_head\.proj\.bias"),
        ({"enable_confidence_head": None}, "has no enable_confidence_head"),
        ({"sample_from_anchor": False}, "sample_from_anchor is false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"causal_head": True}, "field causal_head = True is not known"),
        ({"final_logit_softcapping": 30.0}, r"field final_logit_softcapping = 30\.0 is not known"),
        ({"draft_vocab_size": 256}, "draft_vocab_size is 256, larger than the target's 192"),
        ({"quantization": {"method": "fp8"}}, "quantization is .*fp8"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 16.0}}, "rope type 'yarn'"),
    ],
)
def test_load_drafter_wrong_or_unfitting_configuration_is_refused(
    tmp_path: Path, target_config: ModelConfig, fields: dict[str, Any], message: str
) -> None:
    write_directory(tmp_path, drafter_config(**fields), drafter_tensors(drafter_config(), seed=0))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, target_config)


def test_load_drafter_unknown_field_set_to_null_is_accepted(tmp_path: Path, target_config: ModelConfig) -> None:
    assert load_drafter(write_drafter(tmp_path, some_new_field=None), target_config).config.block_size == 5


@pytest.mark.parametrize("name", ["markov_head.markov_w3.weight", "layers.2.mlp.up_proj.weight", "d2t"])
def test_load_drafter_unknown_tensor_is_refused_by_name(tmp_path: Path, target_config: ModelConfig, name: str) -> None:
    tensors = _tensors(write_drafter(tmp_path))
    write_file(tmp_path / "model.safetensors", {**tensors, name: np.zeros((64, 64), np.float32)})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_drafter(tmp_path, target_config)


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.q_norm.weight", "confidence_head.proj.weight"])
def test_load_drafter_missing_tensor_is_refused_by_name(tmp_path: Path, target_config: ModelConfig, name: str) -> None:
    tensors = _tensors(write_drafter(tmp_path))
    del tensors[name]
    write_file(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"lacks tensor {name}".replace(".", r"\.")):
        load_drafter(tmp_path, target_config)


@pytest.mark.parametrize("own_embed", [True, False])
def test_load_drafter_of_other_width_needs_its_own_embedding_and_head(
    tmp_path: Path, target_config: ModelConfig, own_embed: bool
) -> None:
    config = drafter_config(hidden_size=128, target_hidden_size=64)
    tensors = drafter_tensors(config, seed=0, own_embed=own_embed, own_lm_head=True)
    tensors["fc.weight"] = tensors["fc.weight"][:, :128]
    write_directory(tmp_path, config, tensors)
    if own_embed:
        assert load_drafter(tmp_path, target_config).arrays.shape("fc.weight") == (128, 128)
    else:
        with pytest.raises(CheckpointError, match=r"lacks tensor embed_tokens\.weight"):
            load_drafter(tmp_path, target_config)


def test_share_equal_tensors_drops_only_exact_copies(tmp_path: Path) -> None:
    target = load_target(write_target(tmp_path / "target"))
    directory = write_drafter(tmp_path / "drafter", own_embed=True, own_lm_head=True)
    tensors = _tensors(directory)
    write_file(directory / "model.safetensors", {**tensors, "embed_tokens.weight": target.arrays["embed.weight"]})

    shared = share_equal_tensors(load_drafter(directory, target.config), target)

    assert (shared.shares_embedding, shared.shares_lm_head) == (True, False)
    tied = load_target(write_target(tmp_path / "tied", tie_word_embeddings=True))
    write_file(directory / "model.safetensors", {**tensors, "lm_head.weight": tied.arrays["embed.weight"]})
    shared = share_equal_tensors(load_drafter(directory, tied.config), tied)
    assert (shared.shares_embedding, shared.shares_lm_head) == (False, True)


def test_load_drafter_tied_head_is_its_own_embedding(tmp_path: Path) -> None:
    target = load_target(write_target(tmp_path / "target"))
    write_drafter(tmp_path / "drafter", own_embed=True, tie_word_embeddings=True)
    embedding = _tensors(tmp_path / "drafter")["embed_tokens.weight"]
    drafter = load_drafter(tmp_path / "drafter", target.config)
    np.testing.assert_array_equal(drafter.arrays["lm_head.weight"], embedding)
    assert not drafter.config.backbone.tie_word_embeddings
    # Trained from a frozen copy of an untied target's embedding, the head is still not the target's.
    tensors = {**_tensors(tmp_path / "drafter"), "embed_tokens.weight": target.arrays["embed.weight"]}
    write_file(tmp_path / "drafter" / "model.safetensors", tensors)
    shared = share_equal_tensors(load_drafter(tmp_path / "drafter", target.config), target)
    assert (shared.shares_embedding, shared.shares_lm_head) == (True, False)
    np.testing.assert_array_equal(shared.arrays["lm_head.weight"], target.arrays["embed.weight"])


def test_load_drafter_tied_without_tables_needs_a_tied_target(tmp_path: Path, target_config: ModelConfig) -> None:
    write_drafter(tmp_path / "drafter", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="no embedding of its own and the target's head is not tied; set"):
        load_drafter(tmp_path / "drafter", target_config)
    tied = load_target(write_target(tmp_path / "tied", tie_word_embeddings=True))
    assert load_drafter(tmp_path / "drafter", tied.config).shares_lm_head


def test_load_drafter_int8_rows_equals_rounded_weights(tmp_path: Path, target_config: ModelConfig) -> None:
    config, tensors = drafter_config(quantization={"method": "int8_per_row"}), drafter_tensors(drafter_config(), seed=0)
    packed: dict[str, Any] = {}
    for name, values in tensors.items():
        if values.ndim == 2 and values.shape[0] > 1:
            packed[name], packed[f"{name}_scale"] = quantise_rows(values)
        else:
            packed[name] = values
    write_directory(tmp_path, config, packed)

    arrays = load_drafter(tmp_path, target_config).arrays

    for name, values in arrays.items():
        exact = tensors[arrays.source_name(name)].reshape(values.shape)
        step = np.abs(exact).max(axis=-1, keepdims=True) / 127
        assert np.all(np.abs(values - exact) <= 0.5001 * step)
        assert (values != exact).any() == (values.ndim == 2)
    # Packing what was packed changes nothing.
    values, scales = quantise_rows(arrays["fc.weight"])
    np.testing.assert_array_equal(values, packed["fc.weight"])
    np.testing.assert_allclose(scales, packed["fc.weight_scale"], rtol=1e-6)

    for damage, message in (
        ({"fc.weight_scale": None}, r"int8 tensor fc\.weight .* found none"),
        ({"fc.weight_scale": np.ones(63, np.float32)}, r"shape \[64\], found F32 \[63\]"),
        ({"norm.weight_scale": np.ones(64, np.float32)}, r"holds tensor norm\.weight_scale"),
    ):
        changed = {name: values for name, values in {**packed, **damage}.items() if values is not None}
        write_directory(tmp_path, config, changed)
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path, target_config)


def test_load_drafter_int8_without_quantization_field_is_refused(tmp_path: Path, target_config: ModelConfig) -> None:
    tensors = drafter_tensors(drafter_config(), seed=0)
    tensors["fc.weight"], tensors["fc.weight_scale"] = quantise_rows(tensors["fc.weight"])
    write_directory(tmp_path, drafter_config(), tensors)
    with pytest.raises(CheckpointError, match=r"fc\.weight .* dtype I8"):
        load_drafter(tmp_path, target_config)


def test_quantise_rows_zero_row_stays_zero() -> None:
    values, scales = quantise_rows(np.array([[0, 0], [1, -2]], np.float32))
    np.testing.assert_array_equal(values, [[0, 0], [64, -127]])
    np.testing.assert_allclose(scales, [1, 2 / 127])


def test_quantise_rows_subnormal_row_becomes_zero() -> None:
    values, scales = quantise_rows(np.array([[1e-44, 0], [-3e-40, 1e-41]], np.float32))
    assert not values.any()
    assert np.isfinite(scales).all()
