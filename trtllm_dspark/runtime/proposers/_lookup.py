"""Find what followed the last tokens of a text when they stood there before."""

from __future__ import annotations

from collections.abc import Iterable

MIN_MATCH, MAX_MATCH = 1, 3
"""Tokens that must agree: the longest match is tried first."""


class PromptLookup:
    """The n-grams of one request's text, each with the place where its latest occurrence goes on.

    Appending a token and looking up cost O(max_match), however long the text is.

    Args:
        tokens: the text so far.
        min_match: shortest n-gram looked up.
        max_match: longest n-gram looked up.

    Source: Saxena 2023, prompt lookup decoding.
    """

    def __init__(self, tokens: Iterable[int], *, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"n-grams of {min_match} to {max_match} tokens cannot be looked up")
        self._sizes = range(min_match, max_match + 1)
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        """Return the number of tokens of the text."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            end = len(self._tokens)
            # An n-gram is entered when the token behind it is known, so the text's own end is never found.
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(self._tokens[end - size : end])] = end
            self._tokens.append(token)

    def propose(self, length: int) -> tuple[list[int], int]:
        """Return up to `length` tokens that followed the longest known match, and how many tokens agreed (0 = none).

        A continuation that reaches the end of the text goes on with its own first tokens: a text that repeats itself
        with a short period is proposed in full.
        """
        end = len(self._tokens)
        for size in reversed(self._sizes):
            start = self._next.get(tuple(self._tokens[end - size :])) if size <= end else None
            if start is not None:
                period = end - start
                return [self._tokens[start + index % period] for index in range(length)], size
        return [], 0
