from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.runtime.batcher import Batcher, RoundPlan


@dataclass(eq=False)
class Prompt:
    num_prompt: int
    num_cached: int = 0


def plan(
    batcher: Batcher[Prompt],
    *,
    decoding: int = 0,
    drafts: int = 0,
    prefilling: tuple[Prompt, ...] = (),
    free: int = 8,
) -> RoundPlan[Prompt]:
    return batcher.plan(num_decoding=decoding, drafts_wanted=drafts, prefilling=prefilling, num_free=free)


def filled(max_num_tokens: int, *lengths: int) -> Batcher[Prompt]:
    batcher: Batcher[Prompt] = Batcher(max_num_tokens)
    for length in lengths:
        batcher.add(Prompt(length))
    return batcher


def test_plan_short_prompts_share_a_round_in_order() -> None:
    result = plan(filled(32, 10, 12, 20))
    assert [(chunk.start, chunk.length, chunk.completes) for chunk in result.chunks] == [
        (0, 10, True),
        (0, 12, True),
        (0, 10, False),
    ]
    assert result.draft_budget == 0


def test_plan_unfinished_prompt_goes_before_waiting_ones() -> None:
    first = Prompt(50, num_cached=40)
    result = plan(filled(32, 5), prefilling=(first,))
    assert [(chunk.request.num_prompt, chunk.start, chunk.length) for chunk in result.chunks] == [
        (50, 40, 10),
        (5, 0, 5),
    ]


def test_plan_no_free_slot_admits_nobody() -> None:
    batcher = filled(32, 5)
    assert plan(batcher, decoding=4, drafts=16, free=0).admitted == ()
    assert len(batcher) == 1


def test_plan_drafts_that_fit_beside_a_prompt_keep_their_room() -> None:
    result = plan(filled(64, 100), decoding=2, drafts=14)
    assert result.chunks[0].length == 48
    assert result.draft_budget == 14


def test_plan_drafts_that_do_not_fit_leave_half_to_the_prompt() -> None:
    result = plan(filled(16, 100), decoding=2, drafts=14)
    assert result.chunks[0].length == 7
    assert result.draft_budget == 7


@given(
    st.integers(1, 64),
    st.lists(st.integers(1, 200), max_size=6),
    st.integers(0, 8),
    st.integers(0, 60),
    st.integers(0, 4),
)
def test_plan_any_load_stays_inside_the_budget_and_advances(
    spare: int, lengths: list[int], decoding: int, drafts: int, free: int
) -> None:
    max_num_tokens = decoding + spare
    result = plan(filled(max_num_tokens, *lengths), decoding=decoding, drafts=drafts, free=free)
    used = decoding + result.draft_budget + sum(chunk.length for chunk in result.chunks)
    assert used <= max_num_tokens
    assert result.draft_budget >= 0
    assert len(result.admitted) <= free
    assert all(chunk.completes for chunk in result.chunks[:-1])
    if lengths and free:
        assert result.chunks
