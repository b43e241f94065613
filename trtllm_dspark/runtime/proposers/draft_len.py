"""How many drafts a proposer outside the engine makes."""

from __future__ import annotations

from trtllm_dspark.engine.base import Engine
from trtllm_dspark.errors import ConfigError

DEFAULT_DRAFT_LEN = 7


def checked_draft_len(engine: Engine, max_draft_len: int | None) -> int:
    """Return how many drafts a round proposes for each request.

    Args:
        engine: the target.
        max_draft_len: what was asked for; None = the engine's block, or 7 without one, as far as a pass has room.

    Raises:
        ConfigError: it does not fit.
    """
    limits = engine.limits
    room = limits.max_num_tokens // limits.max_batch_size - 1
    if max_draft_len is None:
        max_draft_len = min(limits.max_draft_len if limits.has_drafter else DEFAULT_DRAFT_LEN, room)
    if not 1 <= max_draft_len <= room:
        raise ConfigError(
            f"{max_draft_len} drafts a request do not fit: a pass of {limits.max_num_tokens} tokens over "
            f"{limits.max_batch_size} requests has room for {room}; build with a larger --max_num_tokens"
        )
    return max_draft_len
