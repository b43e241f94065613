"""The target as training runs it: one graph with the drafter's features, written once, for generation and capture."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtllm_dspark.checkpoint import Checkpoint
from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.onnxruntime import OnnxRuntimeEngine
from trtllm_dspark.errors import ConfigError, DeviceError
from trtllm_dspark.graph import write_target
from trtllm_dspark.runtime import Session, Tokenizer

MAX_PASS_TOKENS = 512
"""Tokens of one pass: wide enough for the matrix products, small enough for the logits of each."""


@dataclass(frozen=True, slots=True)
class FeatureTarget:
    """A written target.

    Attributes:
        directory: holds the graph.
        files: names the checkpoint's contents.
        checkpoint: what it was written from.
        layer_ids: layers whose outputs are the features.
        max_seq_len: tokens of a sequence at most.
    """

    directory: Path
    files: str
    checkpoint: Checkpoint
    layer_ids: tuple[int, ...]
    max_seq_len: int

    def open(self, *, max_batch_size: int, num_threads: int) -> OnnxRuntimeEngine:
        """Load an engine of `max_batch_size` slots."""
        limits = self.limits(max_batch_size)
        return OnnxRuntimeEngine(self.directory, self.checkpoint.config, None, limits, num_threads=num_threads)

    def limits(self, max_batch_size: int) -> EngineLimits:
        """Return what an engine of `max_batch_size` slots takes."""
        config = self.checkpoint.config
        return EngineLimits(
            max_batch_size=max_batch_size,
            max_seq_len=self.max_seq_len,
            max_num_tokens=max(max_batch_size, min(self.max_seq_len, MAX_PASS_TOKENS)),
            max_draft_len=0,
            vocab_size=config.vocab_size,
            draft_vocab_size=0,
            feature_size=len(self.layer_ids) * config.hidden_size,
            mask_token_id=0,
            has_drafter=False,
        )

    def session(self, *, max_batch_size: int, num_threads: int) -> Session:
        """Load a session that generates plainly; `close` it before training.

        Raises:
            ConfigError: the target comes without a tokenizer or chat template.
        """
        tokenizer = self.tokenizer()
        return Session(self.open(max_batch_size=max_batch_size, num_threads=num_threads), tokenizer)

    def tokenizer(self) -> Tokenizer:
        """Return the target's tokenizer.

        Raises:
            ConfigError: the target comes without a tokenizer or chat template.
        """
        assets = self.checkpoint.tokenizer
        if assets is None or assets.chat_template is None:
            raise ConfigError(
                "the target has no tokenizer with a chat template to put prompts in; give --responses_file instead"
            )
        config = self.checkpoint.config
        eos = assets.generation_config.get("eos_token_id", config.eos_token_ids)
        return Tokenizer(
            assets.tokenizer_json,
            chat_template=assets.chat_template,
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
            bos_token_id=config.bos_token_id,
            special_tokens=assets.special_tokens,
        )


def write_feature_target(
    directory: Path,
    checkpoint: Checkpoint,
    layer_ids: Sequence[int],
    *,
    max_seq_len: int,
    weight_dtype: Literal["float32", "int8"],
) -> FeatureTarget:
    """Write the target's graph below `directory`; the same target's that stands there from before is used.

    Raises:
        ConfigError: a feature layer does not exist, or sizes do not fit `weight_dtype`.
        DeviceError: the disk is full or fails.
    """
    files = hashlib.sha256("".join(file.sha256 for file in checkpoint.files).encode()).hexdigest()[:16]
    name = f"{files}.{weight_dtype}.{max_seq_len}.{'_'.join(map(str, layer_ids))}"
    written = FeatureTarget(directory / name, files, checkpoint, tuple(layer_ids), max_seq_len)
    if written.directory.is_dir():
        return written
    part = directory / f"{name}.part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_target(
            part,
            checkpoint.config,
            checkpoint.arrays,
            max_seq_len=max_seq_len,
            feature_layer_ids=layer_ids,
            weight_dtype=weight_dtype,
        )
        os.rename(part, written.directory)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise DeviceError(f"the target cannot be written to {directory} ({error.strerror}); free space") from error
    return written
