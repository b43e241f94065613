"""What a run begins with: a new drafter of its target, or one in any format that `build` reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_dspark.checkpoint import (
    Checkpoint,
    DrafterCheckpoint,
    DrafterConfig,
    load_drafter,
    share_equal_tensors,
)
from trtllm_dspark.checkpoint.arrays import Array
from trtllm_dspark.train.layers import Frozen
from trtllm_dspark.train.parameters import from_arrays, from_target

TABLES = ("embed.weight", "lm_head.weight", "d2t")
"""What a drafter may have of its own and training leaves as it is."""
_W2 = "markov.w2.weight"


def load_source(path: str, target: Checkpoint) -> DrafterCheckpoint:
    """Read a drafter to go on from, without copies of its target's tables.

    Raises:
        CheckpointError: it cannot be read or does not fit the target.
    """
    return share_equal_tensors(load_drafter(path, target.config), target)


def own_vocab(source: DrafterCheckpoint | None) -> NDArray[np.int64] | None:
    """Return the target ids [Vd] that a drafter of a reduced vocabulary proposes, None for all."""
    return None if source is None or "d2t" not in source.arrays else np.asarray(source.arrays["d2t"], np.int64)


def source_digest(source: DrafterCheckpoint | None) -> str | None:
    """Name a drafter's contents, wherever they stand."""
    if source is None:
        return None
    return hashlib.sha256("".join(file.sha256 for file in source.files).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Start:
    """A drafter before its first step.

    Attributes:
        config: of the drafter.
        parameters: canonical name -> what is trained.
        frozen: what its steps read beside that.
        tables: canonical name -> what it has of its own and is not trained: TABLES, and W2 where only rows of it are.
        draft_token_ids: [Vd] target ids that are trained, or None for all.
    """

    config: DrafterConfig
    parameters: dict[str, Tensor]
    frozen: Frozen
    tables: dict[str, Array]
    draft_token_ids: NDArray[np.int64] | None

    @staticmethod
    def of(
        config: DrafterConfig,
        target: Checkpoint,
        source: DrafterCheckpoint | None,
        draft_token_ids: NDArray[np.int64] | None,
        *,
        seed: int,
        num_positions: int,
    ) -> Start:
        """Begin with `source`, or with a new drafter where there is none.

        Args:
            config: of the drafter.
            target: its target.
            source: drafter to go on from.
            draft_token_ids: [Vd] target ids to train, or None for all; those of a source with a reduced vocabulary.
            seed: of a new drafter's draws.
            num_positions: of the rotary tables.
        """
        tables: dict[str, Array] = {}
        # A reduced vocabulary's tables have no other rows.
        rows = None if own_vocab(source) is not None else draft_token_ids
        if source is None:
            parameters = from_target(config, target.config, target.arrays, seed)
        else:
            parameters = from_arrays(config, source.arrays, rows)
            kept = (*TABLES, _W2) if rows is not None else TABLES
            tables = {name: source.arrays[name] for name in kept if name in source.arrays}

        def table(name: str) -> NDArray[np.float32]:
            if name in tables:
                return np.asarray(tables[name], np.float32)
            if name == "lm_head.weight" and target.config.tie_word_embeddings:
                name = "embed.weight"
            return np.asarray(target.arrays[name], np.float32)

        head = table("lm_head.weight")
        if rows is not None:
            head = np.ascontiguousarray(head[rows])
        embedding = torch.from_numpy(np.array(table("embed.weight")))
        frozen = Frozen.of(embedding, torch.from_numpy(np.array(head)), config.backbone, num_positions)
        return Start(config, parameters, frozen, tables, draft_token_ids)

    def whole(self, parameters: Mapping[str, Tensor]) -> tuple[DrafterConfig, dict[str, Array]]:
        """Return the drafter that `parameters` are of, as it is written.

        W2 has a row for every target id, the start's (or zeros) where none was trained; a drafter that came with a
        reduced vocabulary keeps it.
        """
        arrays: dict[str, Array] = {**self.tables, **{name: value.numpy() for name, value in parameters.items()}}
        if "d2t" in arrays:
            return self.config, arrays
        vocab_size = self.config.backbone.vocab_size
        if self.draft_token_ids is not None and _W2 in arrays:
            rows = arrays[_W2]
            full = np.array(self.tables.get(_W2, np.zeros((vocab_size, rows.shape[1]))), np.float32)
            full[self.draft_token_ids] = rows
            arrays[_W2] = full
        return replace(self.config, draft_vocab_size=vocab_size), arrays
