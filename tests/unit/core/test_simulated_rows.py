"""The core's rows of a simulated server do what one request after the other does by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from trtllm_dspark import _core
from trtllm_dspark.errors import NativeError, ShapeError

GAMMA = 5
COUNT = 40


@dataclass
class Alone:
    """One request."""

    block: int
    left: int
    waiting: int
    rounds: int = 0
    emitted: int = 0
    verified: int = 0


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_rows_go_on_join_and_leave_like_requests_by_themselves(seed: int, by_token: bool) -> None:
    rng = np.random.default_rng(seed)
    accepted = rng.integers(0, GAMMA + 1, COUNT)
    # Whoever stands on a block below the last ones stays within the array whatever it accepts.
    following = rng.integers(0, COUNT - GAMMA, COUNT)
    table = rng.random((COUNT, 3)).astype(np.float32)
    most_waiting = (1, 9, 10**6)[seed]
    rows = _core.SimulatedRows(accepted, following, by_token=by_token, most_waiting=most_waiting)
    alone = list[Alone]()
    num_ended = 0
    for round in range(200):
        while len(alone) < 3 or (len(alone) < 12 and rng.random() < 0.3):
            alone.append(Alone(int(rng.integers(COUNT - GAMMA)), int(rng.integers(1, 60)), int(rng.integers(30))))
            rows.join(alone[-1].block, alone[-1].left, alone[-1].waiting)
        assert len(rows) == len(alone)
        caps = rows.caps(GAMMA)
        assert caps.tolist() == [min(one.left - 1, GAMMA) for one in alone]
        assert np.array_equal(rows.confidence(table), table[[one.block for one in alone]])
        plain = round % 7 == 3
        verify_len = rng.integers(0, caps + 1)
        # A row may draft and verify nothing of it.
        drafting = np.where(verify_len > 0, verify_len, rng.integers(0, 2, len(caps)))
        found, num_verified, num_accepted, ended, absorbed = rows.advance(
            *((None,) if plain else (verify_len, drafting))
        )
        beyond = 0
        for one, wanted, kept, cap in zip(alone, verify_len.tolist(), found.tolist(), drafting.tolist(), strict=True):
            wanted = 0 if plain else wanted
            drafts = cap > 0 and not plain
            if drafts or one.waiting >= most_waiting:
                beyond += max(0, one.waiting - 1) if drafts else one.waiting
                one.waiting = 0
            one.waiting += kept + 1
            assert kept == min(wanted, accepted[one.block])
            if by_token or not plain:
                one.block = int(following[one.block + (kept if by_token else 0)])
            one.left -= kept + 1
            one.rounds, one.emitted, one.verified = one.rounds + 1, one.emitted + kept + 1, one.verified + wanted
        assert absorbed == beyond
        assert (num_verified, num_accepted) == (0 if plain else verify_len.sum(), found.sum())
        assert ended == [row for row, one in enumerate(alone) if one.left <= 0]
        for row in reversed(ended):
            one, alone[row] = alone[row], alone[-1]
            alone.pop()
            assert rows.leave(row) == (one.rounds, one.emitted, one.verified)
            num_ended += 1
    assert num_ended > 20
    rows.clear()
    assert len(rows) == 0
    assert rows.advance(None)[0].tolist() == []


def test_what_rows_refuse() -> None:
    accepted, following = np.array([1, 0, 2, 0]), np.array([1, 2, 0, 0])
    with pytest.raises(NativeError, match=r"following\[0\] is 4, expected 0 <= value < 4"):
        _core.SimulatedRows(accepted, np.array([1, 2, 0, 4]), by_token=False)
    with pytest.raises(NativeError, match=r"accepted\[2\] is -1"):
        _core.SimulatedRows(np.array([1, 0, -1, 0]), following, by_token=False)
    with pytest.raises(ShapeError, match=r"following: expected \[N=4\] int64, got \[3\] int64"):
        _core.SimulatedRows(accepted, following[:3].copy(), by_token=False)
    with pytest.raises(NativeError, match="following"):
        # From the third block one gets beyond the last.
        _core.SimulatedRows(accepted, following, by_token=True)
    rows = _core.SimulatedRows(np.array([1, 0, 1, 2]), following, by_token=True)
    with pytest.raises(NativeError, match="block"):
        rows.join(3, 5)
    with pytest.raises(NativeError, match=r"left\[0\] is 0, expected 1"):
        rows.join(0, 0)
    with pytest.raises(NativeError, match=r"waiting\[0\] is -1"):
        rows.join(0, 5, -1)
    with pytest.raises(NativeError, match=r"most_waiting\[0\] is 0, expected 1"):
        _core.SimulatedRows(np.array([1, 0, 1, 2]), following, by_token=True, most_waiting=0)
    rows.join(0, 5)
    with pytest.raises(NativeError, match=r"row\[0\] is 1, expected 0 <= value < 1"):
        rows.leave(1)
    with pytest.raises(NativeError, match=r"verify_len\[0\] is -1"):
        rows.advance(np.array([-1]))
    with pytest.raises(ShapeError, match=r"verify_len: expected \[R=1\] int64, got \[2\] int64"):
        rows.advance(np.array([1, 1]))
    with pytest.raises(ShapeError, match=r"drafting: expected \[R=1\] int64, got \[2\] int64"):
        rows.advance(np.array([1]), np.array([1, 1]))
    with pytest.raises(ShapeError, match=r"of_blocks: expected \[N=4, gamma\] float32"):
        rows.confidence(np.zeros((3, 2), np.float32))


def test_what_waits_is_absorbed_with_a_draft() -> None:
    """By hand: two prompts of 5 and 3 tokens, a draft, three rounds of a bypass, a draft of the first row only."""
    rows = _core.SimulatedRows(np.full(4, 2), np.zeros(4, np.int64), by_token=False, most_waiting=20)
    rows.join(0, 50, 5)
    rows.join(0, 50, 3)
    both, none = np.array([2, 2]), np.array([0, 0])
    # A draft's time has one token a row in it.
    assert rows.advance(none, both)[4] == (5 - 1) + (3 - 1)
    assert rows.advance(both, both)[4] == 0
    # Each has emitted three, then one a round.
    assert [rows.advance(None)[4] for _ in range(3)] == [0, 0, 0]
    assert rows.advance(none, np.array([2, 0]))[4] == 6 - 1
    # The second goes on gathering until it has as many as may wait: 7 so far.
    assert [rows.advance(None)[4] for _ in range(15)] == [0] * 13 + [20, 0]
    # Tokens since: 16 of the first row, 2 of the second.
    assert rows.advance(none, both)[4] == (16 - 1) + (2 - 1)
    # Where nothing may wait every round absorbs what the one before has emitted.
    eager = _core.SimulatedRows(np.full(4, 2), np.zeros(4, np.int64), by_token=False)
    eager.join(0, 50)
    assert [eager.advance(None)[4], eager.advance(none[:1])[4], eager.advance(both[:1], both[:1])[4]] == [0, 1, 0]
    assert eager.advance(None)[4] == 3
