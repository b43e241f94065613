"""Which request owns which row of the caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_dspark.runtime.active import NO_SLOT, ActiveRequest


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Copy a request's cached tokens from one slot to another; moves of one list happen in order."""

    request: ActiveRequest
    source: int
    destination: int


class SlotTable:
    """Keep decoding requests in slots [0, D) and prefilling ones right behind them.

    Every pass then covers contiguous slots and idle slots cost nothing.

    Args:
        capacity: number of slots.
    """

    def __init__(self, capacity: int) -> None:
        self._owners: list[ActiveRequest | None] = [None] * capacity
        self._decoding: list[ActiveRequest] = []
        self._prefilling: list[ActiveRequest] = []
        self._changed = False

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Iterate over the owners in slot order."""
        return (owner for owner in self._owners if owner is not None)

    def __len__(self) -> int:
        """Return the number of owned slots."""
        return len(self._owners) - self._owners.count(None)

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return self._owners.count(None)

    @property
    def decoding(self) -> list[ActiveRequest]:
        """Requests that decoded at the last `compact`, in slot order."""
        return self._decoding

    @property
    def prefilling(self) -> list[ActiveRequest]:
        """Requests whose prompt was not wholly cached at the last `compact`, in slot order."""
        return self._prefilling

    def place(self, request: ActiveRequest) -> None:
        """Give a request the slot behind the last owned one; the table must be compact and not full."""
        request.slot = len(self)
        self._owners[request.slot] = request
        self._changed = True

    def release(self, request: ActiveRequest) -> None:
        """Free a request's slot."""
        if request.slot != NO_SLOT:
            self._owners[request.slot] = None
            request.slot = NO_SLOT
            self._changed = True

    def compact(self) -> list[SlotMove]:
        """Close the holes; returns the copies to make, in order."""
        if not self._changed:
            return []
        self._decoding = [owner for owner in self if owner.decoding]
        self._prefilling = [owner for owner in self if not owner.decoding]
        boundary = len(self._decoding)
        # A prefilling request was placed behind all others and the prompts before it finished first, so a hole below
        # the boundary is never owned by one.
        holes = [slot for slot in range(boundary) if self._owners[slot] is None]
        strays = [owner for owner in self._decoding if owner.slot >= boundary]
        moves = [self._move(owner, slot) for owner, slot in zip(strays, holes, strict=True)]
        for slot, owner in enumerate(self._prefilling, start=boundary):
            if owner.slot != slot:
                moves.append(self._move(owner, slot))
        self._decoding.sort(key=_slot)
        # Prefilling requests start to decode without telling the table.
        self._changed = bool(self._prefilling)
        return moves

    def _move(self, owner: ActiveRequest, destination: int) -> SlotMove:
        move = SlotMove(owner, owner.slot, destination)
        self._owners[owner.slot] = None
        self._owners[destination] = owner
        owner.slot = destination
        return move


def _slot(owner: ActiveRequest) -> int:
    return owner.slot
