"""Leave out the drafter's copies of target tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trtllm_dspark.checkpoint.types import Checkpoint, DrafterCheckpoint


def share_equal_tensors(drafter: DrafterCheckpoint, target: Checkpoint) -> DrafterCheckpoint:
    """Return the drafter without an embedding or output head that equals the target's, value for value.

    DeepSpec stores frozen copies of both with every drafter; an engine needs them once. Reads one pair at a time.
    """
    head = "embed.weight" if target.config.tie_word_embeddings else "lm_head.weight"
    copies = []
    for name, original in (("embed.weight", "embed.weight"), ("lm_head.weight", head)):
        if name not in drafter.arrays or drafter.arrays.shape(name) != target.arrays.shape(original):
            continue
        if np.array_equal(drafter.arrays[name], target.arrays[original]):
            copies.append(name)
    return replace(drafter, arrays=drafter.arrays.without(*copies))
