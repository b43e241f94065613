from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.runtime.stopping import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    stopper = StopStrings(stops)
    out = ""
    for piece in pieces:
        certain, found = stopper.push(piece)
        out += certain
        if found is not None:
            return out, found
    return out + stopper.flush(), None


def by_hand(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    text = ""
    for piece in pieces:
        text += piece
        found = min(((text.find(stop), -len(stop), stop) for stop in stops if stop in text), default=None)
        if found is not None:
            return text[: found[0]], found[2]
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=12),
)
def test_push_any_split_equals_search_in_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == by_hand(stops, pieces)


def test_push_stop_across_three_pieces_never_leaks_its_beginning() -> None:
    stopper = StopStrings(["STOP"])
    assert stopper.push("goS") == ("go", None)
    assert stopper.push("TO") == ("", None)
    assert stopper.push("P!") == ("", "STOP")


def test_push_broken_off_stop_is_given_out() -> None:
    stopper = StopStrings(["STOP"])
    assert stopper.push("ST") == ("", None)
    assert stopper.push("x") == ("STx", None)


def test_flush_gives_what_was_held() -> None:
    stopper = StopStrings(["STOP"])
    stopper.push("aST")
    assert stopper.flush() == "ST"
    assert stopper.flush() == ""


def test_push_two_stops_cuts_at_the_earlier_one() -> None:
    assert StopStrings(["later", "ear"]).push("an early later")[0] == "an "


def test_push_unarmed_passes_a_stop_through() -> None:
    stopper = StopStrings(["ab"])
    assert stopper.push("xab", armed=False) == ("xab", None)
    assert stopper.push("yab") == ("y", "ab")


def test_push_stop_that_begins_unarmed_and_ends_armed_is_found() -> None:
    stopper = StopStrings(["STOP"])
    assert stopper.push("goST", armed=False) == ("go", None)
    assert stopper.push("OP!") == ("", "STOP")


def test_push_stop_that_was_complete_unarmed_is_not_found_although_it_is_still_held() -> None:
    stopper = StopStrings(["ab", "abcd"])  # "ab" may become "abcd", so it is held back
    assert stopper.push("ab", armed=False) == ("", None)
    assert stopper.push("z") == ("abz", None)
    assert stopper.push("ab") == ("", "ab")


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=10),
    st.integers(0, 10),
)
def test_push_finds_the_first_stop_that_ends_behind_the_unarmed_pieces(
    stops: list[str], pieces: list[str], unarmed: int
) -> None:
    stopper = StopStrings(stops)
    out, text, border = "", "", len("".join(pieces[:unarmed]))
    for index, piece in enumerate(pieces):
        text += piece
        certain, found = stopper.push(piece, armed=index >= unarmed)
        out += certain
        ends = [
            (start, -len(stop), stop)
            for stop in stops
            for start in range(len(text) - len(stop) + 1)
            if text.startswith(stop, start) and start + len(stop) > border
        ]
        if ends:
            first = min(ends)
            assert (out, found) == (text[: first[0]], first[2])
            return
        assert found is None
    assert out + stopper.flush() == text
