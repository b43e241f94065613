"""What verifying drafts would have gained, per request, from the blocks of past rounds: what the core counts by."""

from __future__ import annotations

import numpy as np

from trtllm_dspark import _core

THRESHOLDS = np.array(
    [0.03, 0.06, 0.09, 0.12, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 2.0], np.float32
)
"""Least survivals a request may ask of a draft; no draft reaches the last. Throughput is flat around its best."""
MEMORY = 0.9
"""Weight of a block after one more of its request: what is known of a request rests on its last ten blocks."""
POOL_MEMORY = 0.98
PRIOR_BLOCKS = 4.0
"""Blocks that what is known of all requests counts for in a new one; they fade as its own blocks come in."""
RATIO_MEMORY = 0.98
"""Weight of a block's outcome after one more block of its request was verified."""
RATIO_PRIOR = 1.0
"""Drafts that count as right as promised before outcomes say otherwise."""
POOL_DRAFTS = 2.0
"""Drafts that the outcomes of all requests count for in a new one; they fade likewise."""
MAX_RATIO = 1.5
HINDSIGHT_MEMORY = 0.95
"""Weight of what was expected of a block, and of what it held, after one more block of its request."""
HINDSIGHT_PRIOR = 6.0
"""Drafts a new request is taken to have expected."""
HINDSIGHT_FOUND = 0.9
"""Share of those that were found: the usual optimism of the best of several estimates."""


def block_statistics(max_draft_len: int) -> _core.BlockStatistics:
    """Return statistics without any request, of blocks of `max_draft_len` drafts."""
    return _core.BlockStatistics(
        max_draft_len,
        THRESHOLDS,
        memory=MEMORY,
        pool_memory=POOL_MEMORY,
        prior_blocks=PRIOR_BLOCKS,
        ratio_memory=RATIO_MEMORY,
        ratio_prior=RATIO_PRIOR,
        pool_drafts=POOL_DRAFTS,
        max_ratio=MAX_RATIO,
        hindsight_memory=HINDSIGHT_MEMORY,
        hindsight_prior=HINDSIGHT_PRIOR,
        hindsight_found=HINDSIGHT_FOUND,
    )
