"""Prompt lookup against a search by hand and by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.runtime.proposers._lookup import PromptLookup


def brute_force(tokens: list[int], length: int, sizes: range) -> tuple[list[int], int]:
    for size in reversed(sizes):
        if size > len(tokens):
            continue
        suffix = tokens[len(tokens) - size :]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                follow = list(tokens)
                at = start + size
                while len(follow) < len(tokens) + length:
                    follow.append(follow[at])
                    at += 1
                return follow[len(tokens) :], size
    return [], 0


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 8), st.integers(1, 3), st.integers(0, 2))
def test_proposal_is_the_continuation_of_the_latest_longest_match(
    tokens: list[int], length: int, low: int, extra: int
) -> None:
    lookup = PromptLookup(tokens, min_match=low, max_match=low + extra)
    assert lookup.propose(length) == brute_force(tokens, length, range(low, low + extra + 1))


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6))
def test_appending_in_pieces_is_appending_at_once(pieces: list[list[int]]) -> None:
    lookup = PromptLookup([])
    for piece in pieces:
        lookup.extend(piece)
    whole = PromptLookup([token for piece in pieces for token in piece])
    assert lookup.propose(5) == whole.propose(5)
    assert len(lookup) == len(whole)


def test_longer_match_wins_over_a_later_shorter_one() -> None:
    # "1 2 3" was followed by 7; the later "9 3" by 8.
    assert PromptLookup([1, 2, 3, 7, 9, 3, 8, 1, 2, 3]).propose(2) == ([7, 9], 3)


def test_text_with_a_period_is_proposed_in_full() -> None:
    assert PromptLookup([5, 6, 5, 6]).propose(5) == ([5, 6, 5, 6, 5], 2)


def test_nothing_known_proposes_nothing() -> None:
    assert PromptLookup([1, 2, 3]).propose(4) == ([], 0)
    assert PromptLookup([]).propose(4) == ([], 0)


@pytest.mark.parametrize(("low", "high"), [(0, 2), (3, 2)])
def test_impossible_sizes_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="cannot be looked up"):
        PromptLookup([], min_match=low, max_match=high)
