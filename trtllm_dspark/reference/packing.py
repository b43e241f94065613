"""Ragged rows of one verify pass as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


class Packed(NamedTuple):
    """Rows of one pass; padding rows belong to no request.

    Attributes:
        cu_tokens: [R + 1] exclusive prefix sum of 1 + verify_len.
        token_ids: [T_pad] anchor, then the verified drafts of each request; padding 0.
        token_request: [T_pad] request of each row; padding -1.
        token_position: [T_pad] absolute position of each row; padding -1.
    """

    cu_tokens: Int
    token_ids: Int
    token_request: Int
    token_position: Int


def pack_tokens(
    anchors: Sequence[int],
    draft_tokens: Sequence[Sequence[int]],
    verify_len: Sequence[int],
    positions: Sequence[int],
    pad_to: int = 0,
) -> Packed:
    """Pack the anchor and the first verify_len drafts of each request, padded to `pad_to` rows.

    Source: DSpark paper, section 5.2 (flattened variable-length queries).
    """
    ids: list[int] = []
    owners: list[int] = []
    places: list[int] = []
    ends = [0]
    for r, length in enumerate(verify_len):
        ids += [anchors[r], *draft_tokens[r][:length]]
        owners += [r] * (1 + length)
        places += range(positions[r], positions[r] + 1 + length)
        ends.append(len(ids))
    padding = max(0, pad_to - len(ids))
    return Packed(
        np.array(ends, np.int64),
        np.array(ids + [0] * padding, np.int64),
        np.array(owners + [-1] * padding, np.int64),
        np.array(places + [-1] * padding, np.int64),
    )
