"""Fit a drafter's vocabulary-sized tensors to its target: leave out copies, spread a reduced vocabulary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trtllm_dspark.checkpoint.arrays import Array, LazyArray, LazyArrays, equal_values
from trtllm_dspark.checkpoint.types import Checkpoint, DrafterCheckpoint


def share_equal_tensors(drafter: DrafterCheckpoint, target: Checkpoint) -> DrafterCheckpoint:
    """Return the drafter without an embedding or output head that equals the target's, value for value.

    DeepSpec stores frozen copies of both with every drafter; an engine needs them once. Reads a pair in pieces.
    """
    head = "embed.weight" if target.config.tie_word_embeddings else "lm_head.weight"
    copies = []
    for name, original in (("embed.weight", "embed.weight"), ("lm_head.weight", head)):
        if name in drafter.arrays and equal_values(drafter.arrays.entry(name), target.arrays.entry(original)):
            copies.append(name)
    return replace(drafter, arrays=drafter.arrays.without(*copies))


def tie_equal_head(target: Checkpoint) -> Checkpoint:
    """Return a target whose head is a copy of its embedding as one with tied embeddings: an engine needs them once."""
    arrays = target.arrays
    tied = target.config.tie_word_embeddings
    if tied or not equal_values(arrays.entry("embed.weight"), arrays.entry("lm_head.weight")):
        return target
    config = replace(target.config, tie_word_embeddings=True)
    return replace(target, config=config, arrays=arrays.without("lm_head.weight"))


def spread_draft_vocab(drafter: DrafterCheckpoint) -> tuple[DrafterCheckpoint, npt.NDArray[np.int64] | None]:
    """Return the drafter with rows for the whole target vocabulary, and the target ids it was trained to propose.

    For a drafter that came with a reduced vocabulary the output head and W2 get a row for every target id, zeros where
    the drafter has none, and `d2t` is returned apart ([Vd] int64, the only rows an engine may use). Any other drafter
    is returned as it is, with None.
    """
    if "d2t" not in drafter.arrays:
        return drafter, None
    ids = drafter.arrays["d2t"]
    vocab = drafter.config.backbone.vocab_size

    def spread(rows: Array) -> Array:
        full = np.zeros((vocab, rows.shape[1]), rows.dtype)
        full[ids] = rows
        return full

    entries: dict[str, LazyArray] = {}
    for name in drafter.arrays:
        entry = drafter.arrays.entry(name)
        if name in ("lm_head.weight", "markov.w2.weight"):
            entry = entry.map(spread, (vocab, entry.shape[1]))
        if name != "d2t":
            entries[name] = entry
    config = replace(drafter.config, draft_vocab_size=vocab)
    return replace(drafter, config=config, arrays=LazyArrays(entries)), ids
