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
