"""The part of `_core` that simulations use; its rules are those of `_core.pyi`."""

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
Float = NDArray[np.float32]

class SimulatedRows:
    """The decoding requests of a simulated server: where each stands among recorded blocks, what it may still emit.

    Rows are 0 .. R - 1; into the hole of one that leaves the last moves. Methods keep the GIL, as those of
    `BlockStatistics`.

    Args:
        accepted: [N] int64 drafts accepted of each block when it is verified in full, 0..64.
        following: [N] int64 the block behind each. Both are read as long as the rows live and must not change.
        by_token: whether there is a block for every token: who emits n tokens goes on by n blocks.
        most_waiting: a row that does not draft lets the drafter's context absorb what waits once that is so many tokens,
            at least 1; 1 = in every round.

    Raises:
        NativeError: a number is out of range, or from a block that follows another one can get beyond the last.
    """

    def __init__(self, accepted: Int, following: Int, *, by_token: bool, most_waiting: int = 1) -> None: ...
    def __len__(self) -> int: ...
    def join(self, block: int, left: int, waiting: int = 0) -> None:
        """Add a row behind the last: its first block, tokens it may emit, at least 1, and tokens not absorbed yet."""
    def leave(self, row: int) -> tuple[int, int, int]:
        """Take a row out; return rounds it took part in, tokens it emitted, and drafts it verified."""
    def clear(self) -> None:
        """Take all rows out."""
    def caps(self, most: int) -> Int:
        """Return [R] int64 drafts that each may verify: at most `most`, fewer where it may not emit as many."""
    def confidence(self, of_blocks: Float) -> Float:
        """Return the [R, gamma] float32 rows of [N, gamma] that belong to the rows' blocks."""
    def advance(self, verify_len: Int | None, drafting: Int | None = None) -> tuple[Int, int, int, list[int], int]:
        """Let every row emit what a round gives it and go on to its next block.

        Args:
            verify_len: [R] int64 drafts verified; None = nothing was drafted, and a block that is not of a token is met
                again.
            drafting: [R] int64 above 0 where a row drafts, which absorbs what waits of it; None = none does.

        Returns:
            [R] int64 drafts accepted, drafts verified of all rows, drafts accepted of all rows, the rows that have
            emitted all they may, ascending (those must leave before the next round), and the tokens absorbed beyond the
            one of each row that drafts.
        """
