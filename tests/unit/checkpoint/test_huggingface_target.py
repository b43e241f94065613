import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny_models import TINY_SHAPE, write_directory, write_target
from helpers.toy_tokenizer import tokenizer_json

from trtllm_dspark.checkpoint import RopeScaling, load_target
from trtllm_dspark.checkpoint.safetensors_io import read_directory, write_file
from trtllm_dspark.errors import CheckpointError


def _tensors(directory: Path) -> dict[str, Any]:
    return {name: tensor.read() for name, tensor in read_directory(directory)[0].items()}


def _edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_load_target_every_tensor_has_its_canonical_name(tmp_path: Path, architecture: Any, num_shards: int) -> None:
    stored = _tensors(write_target(tmp_path, architecture=architecture, num_shards=num_shards))

    target = load_target(tmp_path)

    config = target.config
    assert (config.architecture, config.qk_norm) == (architecture, architecture == "qwen3")
    assert (config.num_layers, config.head_dim, config.eos_token_ids) == (4, 16, (2,))
    assert len(target.arrays) == len(stored)
    arrays = dict(target.arrays)
    renamed = {target.arrays.source_name(name): values for name, values in arrays.items()}
    assert renamed.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(renamed[name], values)
    np.testing.assert_array_equal(arrays["layers.2.o.weight"], stored["model.layers.2.self_attn.o_proj.weight"])
    np.testing.assert_array_equal(
        arrays["layers.1.mlp_norm.weight"], stored["model.layers.1.post_attention_layernorm.weight"]
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("F16", 1e-3), ("BF16", 1e-2)])
def test_load_target_half_precision_is_widened_to_float32(tmp_path: Path, dtype: Any, tolerance: float) -> None:
    exact = load_target(write_target(tmp_path / "f32")).arrays
    half = load_target(write_target(tmp_path / "half", dtype=dtype)).arrays
    for name in exact:
        assert half[name].dtype == np.float32
        np.testing.assert_allclose(half[name], exact[name], rtol=tolerance, atol=1e-6)


def test_load_target_attention_bias_maps_q_k_v_biases(tmp_path: Path) -> None:
    target = load_target(write_target(tmp_path, attention_bias=True))
    assert target.config.attention_bias
    assert target.arrays.shape("layers.3.k.bias") == (32,)


def test_load_target_tied_head_is_absent_and_equal_copy_is_accepted(tmp_path: Path) -> None:
    write_target(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_target(tmp_path).arrays
    tensors = _tensors(tmp_path)
    write_file(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "lm_head.weight" not in load_target(tmp_path).arrays
    write_file(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": -tensors["model.embed_tokens.weight"]})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load_target(tmp_path)


def test_load_target_llama3_rope_is_read_from_either_field(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    expected = RopeScaling(8.0, 1.0, 4.0, 256)
    old = load_target(write_target(tmp_path / "old", rope_scaling=scaling, rope_theta=5e5)).config
    new = load_target(
        write_target(tmp_path / "new", rope_parameters={**scaling, "rope_theta": 5e5}, rope_theta=None)
    ).config
    assert (old.rope_theta, old.rope_scaling) == (new.rope_theta, new.rope_scaling) == (5e5, expected)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def test_load_target_rope_scaling_hides_rope_parameters(tmp_path: Path) -> None:
    saved = {"rope_type": "default", "rope_theta": 1e6}
    write_target(tmp_path, rope_parameters=saved, rope_scaling={**LLAMA3, "rope_theta": 1e6}, rope_theta=None)
    config = load_target(tmp_path).config
    assert (config.rope_theta, config.rope_scaling) == (1e6, RopeScaling(8.0, 1.0, 4.0, 256))
    _edit_config(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768})
    with pytest.raises(CheckpointError, match="rope type 'yarn' is not supported"):
        load_target(tmp_path)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_load_target_theta_is_read_from_inside_either_field(tmp_path: Path, name: str) -> None:
    write_target(tmp_path, **{name: {"rope_type": "default", "rope_theta": 1e6}}, rope_theta=None)  # type: ignore[arg-type]
    assert load_target(tmp_path).config.rope_theta == 1e6


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 1e4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e4},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {**LLAMA3, "rope_theta": 1e4}, "rope_theta": None},
    ],
)
def test_load_target_theta_with_two_values_is_refused(tmp_path: Path, fields: Any) -> None:
    _edit_config(write_target(tmp_path), **fields)
    with pytest.raises(CheckpointError, match=r"rope_theta is 10000\.0 in one place and 500000\.0 in another"):
        load_target(tmp_path)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_load_target_rope_fields_that_are_no_objects_are_refused(tmp_path: Path, name: str) -> None:
    _edit_config(write_target(tmp_path), **{name: [1.0]})
    with pytest.raises(CheckpointError, match=rf"{name} is \[1\.0\], expected an object"):
        load_target(tmp_path)


def test_load_target_negative_padding_id_means_none(tmp_path: Path) -> None:
    write_target(tmp_path, pad_token_id=-1)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": -1}))
    target = load_target(tmp_path)
    assert target.config.pad_token_id is None
    assert target.tokenizer is not None
    assert "pad_token_id" not in target.tokenizer.generation_config
    for wrong in (True, "0"):
        _edit_config(tmp_path, pad_token_id=wrong)
        with pytest.raises(CheckpointError, match="pad_token_id is"):
            load_target(tmp_path)


def test_load_target_special_tokens_are_those_of_the_tokenizers_own_files(tmp_path: Path) -> None:
    write_target(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())

    def found(settings: Any, older: Any = None) -> Any:
        for name, values in (("tokenizer_config.json", settings), ("special_tokens_map.json", older)):
            (tmp_path / name).unlink(missing_ok=True)
            if values is not None:
                (tmp_path / name).write_text(json.dumps(values))
        tokenizer = load_target(tmp_path).tokenizer
        assert tokenizer is not None
        return tokenizer.special_tokens

    settings = {"bos_token": None, "eos_token": {"content": "<|end|>", "lstrip": False}, "model_max_length": 9}
    expected = {"bos_token": None, "eos_token": "<|end|>"}
    assert found(None) == {}
    assert found({"chat_template": "x"}) == {}
    assert found(settings) == expected
    # The older map counts only where the newer file does not list the added tokens.
    assert found(settings, {"eos_token": "<|pad|>"}) == {**expected, "eos_token": "<|pad|>"}
    assert found({**settings, "added_tokens_decoder": {}}, {"eos_token": "<|pad|>"}) == expected
    for wrong in (7, {"text": "<|end|>"}):
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: eos_token is .*, expected a token's text"):
            found({"eos_token": wrong})


def test_load_target_tokenizer_template_and_generation_config(tmp_path: Path) -> None:
    write_target(tmp_path)
    assert load_target(tmp_path).tokenizer is None
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ yes }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "temperature": 0.6}))

    target = load_target(tmp_path)

    assert target.tokenizer is not None
    assert target.config.eos_token_ids == (5, 6)
    assert target.tokenizer.chat_template == "{{ yes }}"
    assert target.tokenizer.generation_config == {
        "bos_token_id": 1,
        "eos_token_id": [5, 6],
        "pad_token_id": 2,
        "temperature": 0.6,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architecture MistralForCausalLM is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "biases in the MLP"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"vocab_size": 193}, r"model\.embed_tokens\.weight .* has shape \[192, 64\].* \[193, 64\]"),
        ({"num_hidden_layers": 5}, r"lacks tensor model\.layers\.4\.input_layernorm\.weight"),
        ({"num_hidden_layers": 3}, r"holds tensor model\.layers\.3\..*does not have"),
        ({"tie_word_embeddings": "yes"}, "expected true or false"),
    ],
)
def test_load_target_wrong_configuration_is_refused_by_name(tmp_path: Path, fields: Any, message: str) -> None:
    _edit_config(write_target(tmp_path), **fields)
    with pytest.raises(CheckpointError, match=message):
        load_target(tmp_path)


def test_load_target_adapter_directory_is_refused(tmp_path: Path) -> None:
    (write_target(tmp_path) / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LoRA adapter"):
        load_target(tmp_path)


def test_load_target_output_projection_bias_is_refused_by_name(tmp_path: Path) -> None:
    tensors = _tensors(write_target(tmp_path, attention_bias=True))
    write_file(
        tmp_path / "model.safetensors", {**tensors, "model.layers.0.self_attn.o_proj.bias": np.zeros(64, np.float32)}
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.o_proj\.bias"):
        load_target(tmp_path)


def test_load_target_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    tensors = _tensors(write_target(tmp_path))
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    write_file(tmp_path / "model.safetensors", {**tensors, **inv_freq})
    assert len(load_target(tmp_path).arrays) == len(tensors)


def test_load_target_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    tensors = _tensors(write_target(tmp_path))
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    write_file(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* dtype I8"):
        load_target(tmp_path)


def test_load_target_not_a_number_is_refused_when_read(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **TINY_SHAPE}
    tensors = _tensors(write_target(tmp_path))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    arrays = load_target(write_directory(tmp_path, config, tensors)).arrays
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        arrays["layers.1.up.weight"]


def test_load_target_arrays_are_read_anew_on_each_access(tmp_path: Path) -> None:
    arrays = load_target(write_target(tmp_path)).arrays
    first = arrays["norm.weight"]
    first[:] = 0
    assert arrays["norm.weight"].any()


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_load_target_text_that_is_not_utf8_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_target(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match=f"{name} is not UTF-8"):
        load_target(tmp_path)
