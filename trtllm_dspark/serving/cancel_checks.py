"""When to ask Triton whether a request is cancelled. No Triton import.

A question is a round trip to tritonserver, dearer than a response, and most open requests wait or compute: one is asked
about soon after each item and then ever more seldom until the next.
"""

from __future__ import annotations

LONGEST_S = 0.2
"""A cancellation is seen after at most so long, whatever a request does."""
_GROWTH = 4.0


def is_due(now: float, *, heard_at: float, asked_at: float) -> bool:
    """Return whether to ask again; called once a period.

    Args:
        now: monotonic seconds.
        heard_at: when the request arrived or its last item did.
        asked_at: when Triton was asked last; its arrival at first.
    """
    return now - asked_at >= min(_GROWTH * (asked_at - heard_at), LONGEST_S)
