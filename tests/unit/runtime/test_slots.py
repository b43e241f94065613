from __future__ import annotations

import random

import pytest

from trtllm_dspark.runtime.active import ActiveRequest, make_active
from trtllm_dspark.runtime.request import Request
from trtllm_dspark.runtime.slots import SlotTable


def active(name: str = "r") -> ActiveRequest:
    return make_active(
        Request(name, [1, 2]),
        seed=1,
        now=0.0,
        max_seq_len=16,
        block_len=2,
        max_draft_len=2,
        eos_token_ids=(),
        detokenizer=None,
    )


def place(table: SlotTable, *, decoding: bool) -> ActiveRequest:
    request = active()
    table.place(request)
    request.num_cached = request.num_prompt if decoding else 0
    return request


def test_compact_hole_is_filled_by_the_last_decoding_request() -> None:
    table = SlotTable(4)
    rows = [place(table, decoding=True) for _ in range(3)]
    table.release(rows[0])
    (move,) = table.compact()
    assert (move.request, move.source, move.destination) == (rows[2], 2, 0)
    assert table.decoding == [rows[2], rows[1]]


def test_compact_prefilling_request_follows_the_boundary_down() -> None:
    table = SlotTable(4)
    rows = [place(table, decoding=True) for _ in range(2)]
    prompt = place(table, decoding=False)
    table.release(rows[0])
    assert [(move.source, move.destination) for move in table.compact()] == [(1, 0), (2, 1)]
    assert table.prefilling == [prompt]
    assert prompt.slot == 1


def test_compact_without_holes_moves_nothing() -> None:
    table = SlotTable(3)
    for decoding in (True, True, False):
        place(table, decoding=decoding)
    assert table.compact() == []


@pytest.mark.parametrize("seed", range(20))
def test_compact_random_traffic_keeps_slots_contiguous_and_owned_once(seed: int) -> None:
    rng = random.Random(seed)
    table = SlotTable(6)
    cached: dict[int, ActiveRequest] = {}
    for _ in range(200):
        for move in table.compact():
            # The copy must read a slot that still holds its request, and may overwrite no one else's.
            assert cached[move.source] is move.request
            assert cached.get(move.destination) not in [row for row in table if row is not move.request]
            cached[move.destination] = cached.pop(move.source)
        decoding, prefilling = table.decoding, table.prefilling
        assert [row.slot for row in (*decoding, *prefilling)] == list(range(len(table)))
        for row in prefilling:  # prompts finish in order, at most one stays behind
            row.num_cached = row.num_prompt
        for _ in range(rng.randint(0, table.num_free)):
            row = place(table, decoding=True)
            cached[row.slot] = row
        if table.num_free and rng.random() < 0.5:
            row = place(table, decoding=False)
            cached[row.slot] = row
        for row in list(table):
            if rng.random() < 0.3:
                del cached[row.slot]
                table.release(row)
