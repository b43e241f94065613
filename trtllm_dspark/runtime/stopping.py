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

    def push(self, piece: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            piece: text that follows what was pushed before.
            armed: False passes everything through, matches included (before `min_tokens`).

        Returns:
            The text that is now certain, and the stop string that was found, if any; nothing may be pushed after one.
        """
        if not self._stops or not piece:
            return piece, None
        text = self._held + piece
        self._held = ""
        if not armed:
            return text, None
        found = min(((text.find(stop), -len(stop), stop) for stop in self._stops if stop in text), default=None)
        if found is not None:
            return text[: found[0]], found[2]
        certain = len(text) - self._possible_stop(text)
        self._held = text[certain:]
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
