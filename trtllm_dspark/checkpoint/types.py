"""What the readers return."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint.arrays import LazyArrays
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.checkpoint.file_stamp import FileStamp


@dataclass(frozen=True)
class CheckpointFile:
    """One file a checkpoint was read from.

    Make it once the file's header was read: what is told of it later is of the file found now, or an error.
    """

    path: Path
    stamp: FileStamp = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stamp", FileStamp.of(self.path))

    @property
    def name(self) -> str:
        """File name without its directory."""
        return self.path.name

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.stamp.size

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the contents in hexadecimal; read in pieces, on first use.

        Raises:
            CheckpointError: the file was replaced or changed since.
        """
        digest = hashlib.sha256()
        with self.stamp.open() as stream:
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
    special_tokens: dict[str, str | None] = field(default_factory=dict)
    """`bos_token`, `eos_token`... as the chat template sees them; None: the model has none. Absent: as the ids say."""


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
