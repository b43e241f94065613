"""What messages show of values that a client chose."""

from __future__ import annotations

from typing import Any

from trtllm_dspark.errors import cut, shown


def test_shown_spells_short_values_and_cuts_long_ones() -> None:
    # Not parameters: pytest would spell them out as names.
    cases: list[tuple[Any, str]] = [
        ("fast", "'fast'"),
        (b"fast", "b'fast'"),
        (7, "7"),
        (None, "None"),
        (0.1, "0.1"),
        ("x" * 10_000_000, "'" + "x" * 76 + "..."),
        ("\x80" * 10_000_000, ("'" + r"\x80" * 20)[:77] + "..."),
        ("\ud83d", r"'\ud83d'"),
        ([1, 2], "[1, 2]"),
        (10**5000, "<int>"),
        ([10**5000], "<list>"),
    ]
    assert [shown(value) for value, _ in cases] == [expected for _, expected in cases]


def test_shown_containers_are_short_too() -> None:
    for value in (["x" * 1000] * 100_000, {"x" * 1000: "y" * 1000}, list(range(10**6))):
        assert len(shown(value)) <= 80


def test_cut_leaves_what_fits() -> None:
    assert cut("x" * 80) == "x" * 80
    assert cut("x" * 81) == "x" * 77 + "..."
