"""A tokenizer that the runtime could not use is known before a build, not after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import write_target
from helpers.toy_tokenizer import CHAT_TEMPLATE, tokenizer_json

from trtllm_dspark.checkpoint import load_target
from trtllm_dspark.errors import CheckpointError


def write(directory: Path, *, tokenizer: str = "", template: str = CHAT_TEMPLATE, **config: Any) -> Path:
    write_target(directory, num_hidden_layers=1, **config)
    (directory / "tokenizer.json").write_text(tokenizer or tokenizer_json(), "utf-8")
    (directory / "chat_template.jinja").write_text(template, "utf-8")
    return directory


@pytest.mark.parametrize("tokenizer", ["{", "{}", "null", "[" * 100_000, tokenizer_json()[:-5]])
def test_load_target_unreadable_tokenizer_is_refused(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
        load_target(write(tmp_path, tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "none"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        ({"type": "Replace", "pattern": {"Regex": "_"}, "content": " "}, "Replace of a regular expression"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "CTC", "pad_token": "p",
          "word_delimiter_token": "|", "cleanup": True}]}, "CTC"),
    ],
)  # fmt: skip
def test_load_target_tokenizer_whose_decoder_is_unknown_is_refused(tmp_path: Path, decoder: Any, named: str) -> None:
    tokenizer = json.dumps(json.loads(tokenizer_json()) | {"decoder": decoder})
    with pytest.raises(CheckpointError, match=rf"decoder \(.*{named}.*\) is not supported; .*; choose a checkpoint"):
        load_target(write(tmp_path, tokenizer=tokenizer))


def test_load_target_unreadable_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its chat template cannot be read"):
        load_target(write(tmp_path, template="{% if"))


def test_load_target_chat_template_with_loop_controls_is_read(tmp_path: Path) -> None:
    load_target(write(tmp_path, template="{% for m in messages %}{% break %}{% endfor %}"))


def test_load_target_chat_template_with_generation_marks_is_read(tmp_path: Path) -> None:
    load_target(write(tmp_path, template="{% generation %}{{ messages[0].content }}{% endgeneration %}"))
    with pytest.raises(CheckpointError, match="its chat template cannot be read"):
        load_target(write(tmp_path, template="{% generation %}"))


def test_load_target_chat_template_that_would_not_compile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its chat template cannot be read .*no_such_filter"):
        load_target(write(tmp_path, template="{{ messages | no_such_filter }}"))


@pytest.mark.parametrize("ids", [{"eos_token_id": [2, 192]}, {"eos_token_id": 10**30}, {"bos_token_id": 192}])
def test_load_target_special_token_outside_the_vocabulary_is_refused(tmp_path: Path, ids: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=rf"{next(iter(ids))} is \d+, outside the vocabulary of 192 tokens"):
        load_target(write(tmp_path, **ids))
