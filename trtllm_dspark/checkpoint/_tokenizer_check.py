"""Is the tokenizer of a checkpoint one that the runtime can use? Known before a build, not after it."""

from __future__ import annotations

from pathlib import Path

import jinja2
import tokenizers

from trtllm_dspark.checkpoint.chat_template import compile_chat_template
from trtllm_dspark.checkpoint.token_bytes import token_bytes_of
from trtllm_dspark.checkpoint.types import Checkpoint
from trtllm_dspark.errors import CheckpointError, EngineError


def check_tokenizer(path: Path, checkpoint: Checkpoint) -> None:
    """Refuse a tokenizer or chat template that cannot be used, and special tokens that the model does not have.

    Args:
        path: of the checkpoint, for messages.
        checkpoint: a target as loaded.

    Raises:
        CheckpointError: naming what is wrong.
    """
    config = checkpoint.config
    bos = () if config.bos_token_id is None else (config.bos_token_id,)
    for name, ids in (("bos_token_id", bos), ("eos_token_id", config.eos_token_ids)):
        for token in ids:
            if token >= config.vocab_size:
                raise CheckpointError(
                    f"{path}: {name} is {token}, outside the vocabulary of {config.vocab_size} tokens; correct it"
                )
    assets = checkpoint.tokenizer
    if assets is None:
        return
    try:
        tokenizer = tokenizers.Tokenizer.from_str(assets.tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: its tokenizer cannot be read ({error}); get it again") from error
    try:
        token_bytes_of(tokenizer)
    except EngineError as error:
        raise CheckpointError(f"{path}: {error}; choose a checkpoint with one of those") from error
    if assets.chat_template is None:
        return
    try:
        compile_chat_template(assets.chat_template)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"{path}: its chat template cannot be read ({error}); correct it") from error
