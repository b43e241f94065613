"""Index tensors that make and undo the padded view of packed ragged rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtllm_dspark.engine.base import IntArray


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where each packed token stands.

    Attributes:
        positions: [T] position of each token in its request.
        pad_index: [R, S] packed index of each padded slot; slots behind a row's end repeat its last token.
        pack_index: [T] index of each token in the flattened padded view.
    """

    positions: IntArray
    pad_index: IntArray
    pack_index: IntArray

    @property
    def width(self) -> int:
        """S: tokens of the widest row, at least the minimum asked for."""
        return int(self.pad_index.shape[1])


def pack_rows(row_lens: IntArray, write_indices: IntArray, *, min_width: int = 1) -> PackedRows:
    """Compute the indices of one pass.

    Args:
        row_lens: [R] tokens of each row; a row of 0 tokens pads with some other row's token.
        write_indices: [R] position of each row's first token.
        min_width: smallest S.
    """
    num_rows = row_lens.size
    starts = np.zeros(num_rows, np.int64)
    np.cumsum(row_lens[:-1], out=starts[1:])
    width = max(min_width, int(row_lens.max()))
    slots = np.arange(width, dtype=np.int64)
    pad_index = starts[:, None] + np.minimum(slots, (row_lens - 1)[:, None])
    # A row without tokens at the very front would point at -1.
    np.maximum(pad_index, 0, out=pad_index)
    rows = np.repeat(np.arange(num_rows, dtype=np.int64), row_lens)
    within = np.arange(rows.size, dtype=np.int64) - starts[rows]
    return PackedRows(write_indices[rows] + within, pad_index, rows * width + within)
