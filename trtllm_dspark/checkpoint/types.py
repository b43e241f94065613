"""What the readers return."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint.arrays import LazyArrays
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig


@dataclass(frozen=True)
class CheckpointFile:
    """One file a checkpoint was read from."""

    path: Path

    @property
    def name(self) -> str:
        """File name without its directory."""
        return self.path.name

    @cached_property
    def size(self) -> int:
        """Size in bytes."""
        return self.path.stat().st_size

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the contents in hexadecimal; read in pieces, on first use."""
        digest = hashlib.sha256()
        with self.path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class TokenizerAssets:
    """Everything needed to turn text into ids and back, independent of where it came from."""

    tokenizer_json: str
    """A `tokenizer.json` of the Hugging Face `tokenizers` library."""
    chat_template: str | None
    """Jinja source of the chat template; None when the model has none."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    """At least `bos_token_id`, `eos_token_id` (a list) and `pad_token_id` where the model defines them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A target model: configuration, lazily read weights and tokenizer."""

    config: ModelConfig
    arrays: LazyArrays
    files: tuple[CheckpointFile, ...]
    tokenizer: TokenizerAssets | None
    format: str
    """`gguf` or `huggingface`."""


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """A drafter: configuration and lazily read weights.

    `embed.weight` and `lm_head.weight` are absent from `arrays` when the drafter shares the target's.
    """

    config: DrafterConfig
    arrays: LazyArrays
    files: tuple[CheckpointFile, ...]
    format: str
    """`deepspec`, `speculators`, `specforge`, `eagle3` or `mtp`."""

    @property
    def shares_embedding(self) -> bool:
        """True when the drafter embeds its tokens with the target's table."""
        return "embed.weight" not in self.arrays

    @property
    def shares_lm_head(self) -> bool:
        """True when the drafter's base logits come from the target's output head."""
        return "lm_head.weight" not in self.arrays
