"""Where an output ends: stop tokens, and stop strings across token, round and block borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Pass text through until a stop string appears, holding back what may still become one.

    Args:
        stops: non-empty strings; none of them ever reaches the output.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._passed = 0  # how much of what is held came with pieces that were not armed

    def push(self, piece: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            piece: text that follows what was pushed before.
            armed: False lets stop strings pass that are complete with this piece (before `min_tokens`); one that only
                begins in it ends the text when a later, armed piece completes it.

        Returns:
            The text that is now certain, and the stop string that was found, if any; nothing may be pushed after one.
        """
        if not self._stops or not piece:
            return piece, None
        text = self._held + piece
        if armed:
            # Nothing may match that was complete before the first armed piece.
            starts = [(text.find(stop, max(0, self._passed - len(stop) + 1)), -len(stop), stop) for stop in self._stops]
            found = min((start for start in starts if start[0] >= 0), default=None)
            if found is not None:
                self._held = ""
                return text[: found[0]], found[2]
        else:
            self._passed = len(text)
        certain = len(text) - self._possible_stop(text)
        self._held = text[certain:]
        self._passed = max(0, self._passed - certain)
        return text[:certain], None

    def flush(self) -> str:
        """Return the held text: the output ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
