"""Buckets and graph keys: no two rounds of distinct shapes share a key, and every bucket holds its round."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.tiny_tensorrt import Written
from helpers.trt_fixtures import Opened
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dspark.engine.tensorrt._buckets import (
    RoundKey,
    block_shapes,
    choose_key,
    context_shapes,
    ladder,
    round_up,
    target_shapes,
)


@st.composite
def demands(draw: st.DrawFn) -> dict[str, Any]:
    """A round that fits some engine."""
    max_requests = draw(st.integers(1, 300))
    draft_len = draw(st.integers(0, 8))
    requests = draw(st.integers(1, max_requests))
    drafts = draw(st.integers(0, requests * draft_len))
    most = max_requests * (draft_len + 1)
    max_tokens = draw(st.integers(requests + drafts, max(requests + drafts, most)))
    return {
        "num_requests": requests,
        "num_drafts": drafts,
        "draft_len": draft_len,
        "mode": draw(st.integers(0, 3)),
        "acceptance": draw(st.integers(0, 2)),
        "bans": draw(st.booleans()),
        "max_requests": max_requests,
        "max_tokens": max_tokens,
    }


def shapes(key: RoundKey) -> tuple[object, ...]:
    """All shapes a captured round fixes, and what chooses its launches."""
    target = target_shapes(key.num_requests, key.row_len, key.num_tokens, key.num_tokens)
    context = context_shapes(key.num_requests, key.row_len, key.num_tokens, 7)
    block = block_shapes(key.num_requests, 5) if key.draft_len else {}
    parts = [tuple(sorted(entry.items())) for entry in (target, context, block)]
    return (*parts, key.mode, key.acceptance, key.bans)


@settings(max_examples=150, deadline=None)
@given(demand=demands())
def test_key_holds_its_round_and_fits_the_plans(demand: dict[str, Any]) -> None:
    key = choose_key(**demand)
    assert demand["num_requests"] <= key.num_requests <= demand["max_requests"]
    assert key.num_requests + demand["num_drafts"] <= key.num_tokens <= demand["max_tokens"]
    # The packed rows of the schedule kernel hold no more than that.
    assert key.num_tokens <= key.num_requests * (demand["draft_len"] + 1)
    if key.num_requests > 4:
        assert key.num_requests <= 1.5 * demand["num_requests"]


@settings(max_examples=150, deadline=None)
@given(first=demands(), second=demands())
def test_key_distinct_shapes_never_share_one(first: dict[str, Any], second: dict[str, Any]) -> None:
    one, other = choose_key(**first), choose_key(**second)
    assert (one == other) == (shapes(one) == shapes(other))
    assert one != other or hash(one) == hash(other)


@given(st.integers(1, 5000))
def test_ladder_ends_at_its_limit_and_wastes_a_third_at_most(limit: int) -> None:
    steps = ladder(limit)
    assert steps[0] == 1
    assert steps[-1] == limit
    assert list(steps) == sorted(set(steps))
    for low, high in zip(steps, steps[1:], strict=False):
        assert high <= 2 * low
        assert low < 2 or high <= 1.5 * (low + 1)
        assert round_up(low + 1, steps) == high


@pytest.mark.parametrize("speculation", [0, 5])
def test_round_of_every_key_binds_the_shapes_of_its_key(toy_weights: Written, opened: Opened, speculation: int) -> None:
    """What a key's contexts are bound to is a function of the key alone."""
    engine, device = opened(toy_weights)
    assert engine._rounds is not None
    seen: dict[tuple[object, ...], RoundKey] = {}
    for requests in range(1, 5):
        for tokens in range(requests, requests * (speculation + 1) + 1):
            key = RoundKey(requests, tokens, speculation, 0, 0, bans=False)
            contexts = engine._rounds._round.contexts(key)
            bound = tuple(tuple(sorted(context.shapes.items())) for context in contexts)  # type: ignore[attr-defined]
            assert seen.setdefault(bound, key) == key
            names = [context.plan.name for context in contexts]  # type: ignore[attr-defined]
            assert names == ["target", "drafter_context", "drafter_block"][: 3 if speculation else 2]
            for context in contexts:
                assert context.profile == 0  # type: ignore[attr-defined]
                context.close()
