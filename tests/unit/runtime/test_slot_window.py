"""Sessions that take turns on one engine, each in slots of its own, write the text they write alone."""

from __future__ import annotations

from types import ModuleType

import pytest
from helpers.benchmarks import load_benchmark
from helpers.fake_engine import FakeEngine, greedy

from trtllm_dspark.runtime import Request, SamplingParams, Session


@pytest.fixture(scope="module")
def windows() -> ModuleType:
    """Return the benchmarks' module."""
    return load_benchmark("slot_window")


def test_turns_keep_their_caches(windows: ModuleType) -> None:
    """The fake target hashes what its slot holds, so that a token of another session's would change the text."""
    engine = FakeEngine(max_batch_size=6)
    sessions = [
        Session(windows.SlotWindow(engine, 2 * index, 2), None, speculation=mode)
        for index, mode in enumerate(("off", "fixed", "adaptive"))
    ]
    assert {session.limits.max_batch_size for session in sessions} == {2}
    texts: dict[tuple[int, str], list[int]] = {}
    for number, session in enumerate(sessions):
        for name in "abc":
            session.add(Request(name, [number + 1, ord(name) % 7, 3], SamplingParams(max_tokens=20)))
            texts[number, name] = []
    while any(session.has_unfinished() for session in sessions):
        for number, session in enumerate(sessions):
            for output in session.step() if session.has_unfinished() else ():
                texts[number, output.request_id] += output.new_token_ids
    for (number, name), text in texts.items():
        assert text == greedy([number + 1, ord(name) % 7, 3], 20)


def test_a_window_lies_inside_its_engine(windows: ModuleType) -> None:
    with pytest.raises(ValueError, match="slots 3 to 4 of an engine with 4"):
        windows.SlotWindow(FakeEngine(), 3, 2)
