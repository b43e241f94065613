import json
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_tokenizer import VOCAB_SIZE, encode, tokenizer_json
from tokenizers import Tokenizer, pre_tokenizers

from trtllm_dspark.checkpoint._gguf_tokenizer import read_tokenizer
from trtllm_dspark.errors import CheckpointError

PATH = Path("model.gguf")


def _metadata(**fields: Any) -> dict[str, Any]:
    """Return the toy tokenizer as GGUF metadata, with two merges and a user-defined token."""
    toy = json.loads(tokenizer_json())
    tokens = [*toy["model"]["vocab"], "ab", "abc", "<tool>"]
    special = {entry["id"] for entry in toy["added_tokens"]}
    types = [3 if index in special else 1 for index in range(VOCAB_SIZE)] + [1, 1, 4]
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types,
        "merges": ["a b", "ab c"],
        "bos_token_id": 2,
        "eos_token_id": 0,
        **fields,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def _tokenizer(**fields: Any) -> Tokenizer:
    assets = read_tokenizer(PATH, _metadata(**fields))
    assert assets is not None
    return Tokenizer.from_str(assets.tokenizer_json)


def test_read_tokenizer_merges_special_and_user_tokens() -> None:
    tokenizer = _tokenizer()
    assert tokenizer.encode("abcab<|end|>é<tool>").ids == [257, 256, 0, *encode("é"), 258]
    assert tokenizer.decode([257, 0, *encode("é"), 258]) == "abcé<tool>"
    assert tokenizer.decode([257, 0], skip_special_tokens=False) == "abc<|end|>"


@pytest.mark.parametrize(("add_bos", "prefix"), [(True, [2]), (False, []), (None, [])])
def test_read_tokenizer_add_bos_prepends_it(add_bos: bool | None, prefix: list[int]) -> None:
    tokenizer = _tokenizer(add_bos_token=add_bos)
    assert tokenizer.encode("abc").ids == [*prefix, 257]
    assert tokenizer.encode("abc", add_special_tokens=False).ids == [257]


def test_read_tokenizer_generation_config_lists_every_end_token() -> None:
    assets = read_tokenizer(PATH, _metadata(eot_token_id=1, eom_token_id=0, padding_token_id=2))
    assert assets is not None
    assert assets.generation_config == {"bos_token_id": 2, "eos_token_id": [0, 1], "pad_token_id": 2}
    assert assets.chat_template is None


END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>", "<end_of_turn>")


@pytest.mark.parametrize("text", END_TEXTS)
def test_read_tokenizer_control_tokens_known_by_their_text_end_a_generation(text: str) -> None:
    tokens = list(_metadata()["tokenizer.ggml.tokens"])
    tokens[1] = text

    def ends(**fields: Any) -> Any:
        assets = read_tokenizer(PATH, _metadata(tokens=tokens, **fields))
        assert assets is not None
        return assets.generation_config["eos_token_id"]

    # Token 0, the end of sequence, stands first: templates know it as eos_token.
    assert ends() == [0, 1]
    assert ends(eos_token_id=2) == [2, 0, 1]
    # The text alone may be a user's: it has to be a control token, and the file may give it another meaning.
    types = list(_metadata()["tokenizer.ggml.token_type"])
    types[1] = 4
    assert ends(token_type=types) == [0]
    assert ends(unknown_token_id=1) == [0]


def test_read_tokenizer_without_tokenizer_returns_none() -> None:
    assert read_tokenizer(PATH, {}) is None


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", "Ġ2024", "!", "Ġ", "Ġok", "ĊĠĠ", "Ġ7"]),
        ("smollm", ["it", "'s", "Ġ", "2", "0", "2", "4", "!", "Ġ", "Ġok", "ĊĠĠĠ", "7"]),
        ("llama-bpe", ["it", "'s", "Ġ", "202", "4", "!", "Ġ", "Ġok", "Ċ", "ĠĠ", "Ġ", "7"]),
        ("qwen2", ["it", "'s", "Ġ", "2", "0", "2", "4", "!", "Ġ", "Ġok", "Ċ", "ĠĠ", "Ġ", "7"]),
    ],
)
def test_read_tokenizer_pre_tokenizer_cuts_as_named(pre: str, pieces: list[str]) -> None:
    pre_tokenizer = _tokenizer(pre=pre).pre_tokenizer
    assert isinstance(pre_tokenizer, pre_tokenizers.PreTokenizer)
    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str("it's 2024!  ok\n   7")] == pieces


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "llama"}, "tokenizer 'llama'"),
        ({"pre": None}, "pre-tokenizer 'default'"),
        ({"token_type": [1]}, "the file is damaged"),
        ({"tokens": ["a"] * (VOCAB_SIZE + 3)}, "1 distinct"),
        ({"merges": ["a b c"]}, "merge 'a b c'"),
        ({"eos_token_id": 999}, "eos_token_id is 999"),
    ],
)
def test_read_tokenizer_bad_tables_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer(PATH, _metadata(**fields))
