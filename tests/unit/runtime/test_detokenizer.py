from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from helpers.toy_tokenizer import BYTE_TO_ID, EOS, encode, tokenizer_json
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.checkpoint.token_bytes import token_bytes_of
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.errors import EngineError
from trtllm_dspark.runtime.detokenizer import Detokenizer
from trtllm_dspark.runtime.tokenizer import Tokenizer

TOY = Tokenizer(tokenizer_json(), eos_token_ids=(EOS,))


def sentencepiece_json() -> str:
    vocab = {"<unk>": 0, "</s>": 1, "\u2581Hello": 2, "\u2581world": 3, "!": 4}
    vocab |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": 1, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
                              "rstrip": False, "normalized": False}],
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True, "unk_token": "<unk>"},
        }
    )  # fmt: skip


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])))
def test_push_any_text_token_by_token_concatenates_to_it(text: str) -> None:
    detokenizer = TOY.detokenizer()
    ids = [BYTE_TO_ID[byte] for byte in text.encode()]
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) == text


def test_push_four_byte_character_appears_with_its_last_token() -> None:
    detokenizer = TOY.detokenizer()
    pieces = [detokenizer.push(token) for token in encode("😀")]
    assert pieces == ["", "", "", "😀"]


def test_push_character_that_never_completes_gives_no_replacement_character() -> None:
    detokenizer = TOY.detokenizer()
    assert "".join(detokenizer.push(token) for token in encode("a€")[:-1]) == "a"


def test_push_invalid_bytes_equals_the_library() -> None:
    broken = [BYTE_TO_ID[byte] for byte in (0x61, 0xE2, 0x82, 0x62, 0x80, 0x63)]
    library = tokenizers.Tokenizer.from_str(tokenizer_json())
    assert TOY.decode(broken) == library.decode(broken) == "a\ufffdb\ufffdc"


def test_push_special_token_gives_no_text() -> None:
    assert TOY.decode([*encode("ab"), EOS, *encode("c")]) == "abc"


def test_push_special_token_inside_a_character_does_not_break_it() -> None:
    first, *rest = encode("é")
    assert TOY.decode([first, EOS, *rest]) == "é"


def test_push_sentencepiece_pieces_keeps_spaces_and_byte_tokens() -> None:
    detokenizer = Detokenizer(token_bytes_of(tokenizers.Tokenizer.from_str(sentencepiece_json())))
    ids = [2, 3, 4, *(5 + byte for byte in "é".encode()), 1]
    assert "".join(detokenizer.push(token) for token in ids) == " Hello world!é"


def test_push_id_beyond_the_vocabulary_gives_no_text() -> None:
    assert TOY.decode([*encode("a"), 10_000]) == "a"


def test_token_bytes_unknown_decoder_is_refused_by_name() -> None:
    spec = json.loads(tokenizer_json()) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    with pytest.raises(EngineError, match="WordPiece"):
        token_bytes_of(tokenizers.Tokenizer.from_str(json.dumps(spec)))


def test_token_bytes_replacement_of_a_regular_expression_is_refused() -> None:
    replace = {"type": "Replace", "pattern": {"Regex": "_"}, "content": " "}
    spec = json.loads(tokenizer_json()) | {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, replace]}}
    with pytest.raises(EngineError, match="Replace of a regular expression"):
        token_bytes_of(tokenizers.Tokenizer.from_str(json.dumps(spec)))


def test_open_engine_whose_decoder_is_unknown_is_refused(toy_engine_dir: Path, tmp_path: Path) -> None:
    """Built by a version that did not look: the first request must not be the one that finds out."""
    directory = tmp_path / "engine"
    shutil.copytree(toy_engine_dir, directory)
    found = open_engine_dir(directory)
    spec = json.loads((directory / "tokenizer.json").read_text("utf-8")) | {"decoder": None}
    (directory / "tokenizer.json").write_text(json.dumps(spec), "utf-8")
    with pytest.raises(EngineError, match="decoder .* is not supported"):
        Tokenizer.open(found)


def test_token_bytes_no_decoder_is_refused() -> None:
    spec = json.loads(tokenizer_json()) | {"decoder": None}
    with pytest.raises(EngineError, match="none"):
        token_bytes_of(tokenizers.Tokenizer.from_str(json.dumps(spec)))
