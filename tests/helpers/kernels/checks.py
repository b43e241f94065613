"""What every kernel must satisfy on every backend, and the shapes it is tried with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from helpers.kernels.attention import (
    AttentionShape,
    exact_attention,
    make_attention,
    run_append,
    run_attention,
    tolerance,
)
from helpers.kernels.backends import Backend
from helpers.kernels.round_cases import RoundShape, core_draft, make_round
from helpers.kernels.rounds import run_accept, run_draft
from helpers.kernels.schedule import ScheduleShape, core_schedule, make_schedule, run_schedule
from trtllm_dspark import _core

ROUNDS = {
    "plain": RoundShape(),
    "one_request": RoundShape(num_requests=1, vocab=5000, filters=False),
    "no_request": RoundShape(num_requests=0),
    "many_requests": RoundShape(num_requests=70, draft_len=2, vocab=300),
    "most_requests": RoundShape(num_requests=256, draft_len=1, vocab=40, rank=4),
    "unfiltered": RoundShape(num_requests=5, vocab=3077, filters=False),
    "filtered_wide": RoundShape(num_requests=6, vocab=9000),
    "filtered_wide_float16": RoundShape(num_requests=6, vocab=7001, logits_type="float16", acceptance="coupled"),
    "greedy_mode": RoundShape(acceptance="greedy", vocab=1025),
    "coupled": RoundShape(acceptance="coupled"),
    "no_head": RoundShape(head_kind="none"),
    "gated": RoundShape(head_kind="gated", hidden_size=37),
    "rnn": RoundShape(head_kind="rnn", rank=17),
    "int8": RoundShape(weight_type="int8", rank=18),
    "int8_gated": RoundShape(weight_type="int8", head_kind="gated", rank=7),
    "int8_rnn_walk": RoundShape(weight_type="int8", head_kind="rnn", num_candidates=33),
    "bfloat16": RoundShape(weight_type="bfloat16", logits_type="bfloat16", rank=13),
    "float16": RoundShape(weight_type="float16", logits_type="float16", rank=32, vocab=1024),
    "mapped": RoundShape(draft_vocab=700, weight_type="float16", logits_type="bfloat16"),
    "mapped_coupled": RoundShape(draft_vocab=900, vocab=2100, acceptance="coupled", filters=False, num_requests=5),
    "walk": RoundShape(num_candidates=40, vocab=2500, num_requests=6),
    "walk_all": RoundShape(num_candidates=60, vocab=60, num_requests=6),
    "walk_mapped_coupled": RoundShape(num_candidates=17, acceptance="coupled", draft_vocab=900, weight_type="bfloat16"),
    "walk_greedy": RoundShape(num_candidates=8, acceptance="greedy", head_kind="none"),
    "bad_rows": RoundShape(num_requests=9, bad_rows=True),
    "bad_rows_walk": RoundShape(num_requests=9, bad_rows=True, num_candidates=12),
    "long_rank": RoundShape(num_requests=2, rank=1200, vocab=400, draft_len=2),
}

ATTENTIONS = {
    "causal": AttentionShape(),
    "block": AttentionShape(causal=False),
    "bfloat16": AttentionShape(element_type="bfloat16", tokens=(9, 8, 8)),
    "wide_head": AttentionShape(head_dim=128, num_heads=8, num_kv_heads=1, tokens=(8, 1, 9), kv_split=128),
    "wide_head_bfloat16": AttentionShape(head_dim=128, element_type="bfloat16", causal=False, contexts=(100, 0, 64)),
    "slot_cache": AttentionShape(page_size=256, pages_per_request=1),
    "one_piece": AttentionShape(kv_split=512),
    "empty_request": AttentionShape(tokens=(1, 0, 2)),
    "prefill": AttentionShape(contexts=(64, 0, 191), tokens=(60, 1, 1)),
    "full_cache": AttentionShape(contexts=(252, 0), tokens=(4, 1)),
}

SCHEDULES = {
    **{f"{mode}": ScheduleShape(mode=mode) for mode in ("fixed", "threshold", "early_stop", "stale_topk")},
    **{f"early_stop_{table}": ScheduleShape(table=table) for table in ("missing", "short", "flat", "bad")},
    "threshold_each": ScheduleShape(mode="threshold", num_requests=9, row_thresholds=True),
    "threshold_budget": ScheduleShape(mode="threshold", token_budget=3),
    "stale_budget": ScheduleShape(mode="stale_topk", token_budget=3, table="missing"),
    "riding_along": ScheduleShape(num_requests=24, draft_len=6, riding_along=7, seed=1),
    "riding_along_stale": ScheduleShape(num_requests=24, draft_len=6, mode="stale_topk", riding_along=7, seed=1),
    "one_request": ScheduleShape(num_requests=1, draft_len=1),
    "largest": ScheduleShape(num_requests=256, draft_len=7, hidden_size=16),
    "no_markov_half": ScheduleShape(markov=False, hidden_size=33),
}


def check_round(backend: Backend, shape: RoundShape) -> None:
    """Draft and acceptance equal the core bit for bit, the distribution drafted from included."""
    case = make_round(shape)
    draft = run_draft(backend, case)
    accepted = run_accept(backend, case, draft)
    if shape.num_requests == 0:
        return
    expected = core_draft(case)
    np.testing.assert_array_equal(draft["status"], expected.status, err_msg=f"{shape=}")
    np.testing.assert_array_equal(draft["draft_tokens"], expected.tokens, err_msg=f"{shape=}")
    emitted = _core.accept_ragged(
        case.core_target(), case.verify_len, case.positions.astype(np.int64), case.sampling(), draft=expected,
        acceptance=shape.acceptance,  # type: ignore[arg-type]
    )  # fmt: skip
    np.testing.assert_array_equal(accepted["status"], emitted.status, err_msg=f"{shape=}")
    np.testing.assert_array_equal(accepted["emitted_len"], emitted.emitted_len, err_msg=f"{shape=}")
    np.testing.assert_array_equal(accepted["out_tokens"], emitted.tokens, err_msg=f"{shape=}")
    for request in np.flatnonzero(expected.status == 0):
        for step in range(shape.draft_len):
            masses = expected.masses(int(request), step)
            total = int(draft["draft_totals"][request, step])
            if total == 0:  # a point mass
                assert np.flatnonzero(masses).tolist() == [draft["draft_tokens"][request, step]]
            else:
                assert total == int(masses.sum()), f"{request=} {step=} {shape=}"


def check_attention(backend: Backend, shape: AttentionShape) -> None:
    """Appended rows land where the page table says and nowhere else; attention is within its stated tolerance."""
    case = make_attention(shape)
    caches = run_append(backend, case)
    for before, after, fresh in zip(
        (case.key_cache, case.value_cache), caches, (case.new_keys, case.new_values), strict=True
    ):
        expected = before.copy()
        for token in np.flatnonzero(case.token_request >= 0):
            position = case.token_position[token]
            page = case.page_table[case.token_request[token], position // shape.page_size]
            expected[page, :, position % shape.page_size] = fresh[token]
        np.testing.assert_array_equal(after.view(np.uint16), expected.view(np.uint16), err_msg=f"{shape=}")
    output = run_attention(backend, case, *caches)
    error = np.abs(output - exact_attention(case))
    assert np.isfinite(output).all(), f"{shape=}"
    assert error.max() <= tolerance(case), f"{error.max()=} {np.unravel_index(error.argmax(), error.shape)} {shape=}"
    assert not output[case.token_request < 0].any(), f"padding rows are zero {shape=}"


def check_attention_alone(backend: Backend, shape: AttentionShape) -> None:
    """A request has the same bits alone as among others."""
    case = make_attention(shape)
    caches = run_append(backend, case)
    together = run_attention(backend, case, *caches)
    for request, count in enumerate(shape.tokens):
        rows = slice(case.cu_tokens[request], case.cu_tokens[request + 1])
        alone = replace(
            case,
            shape=replace(shape, contexts=(shape.contexts[request],), tokens=(count,), padding=0),
            query=case.query[rows],
            token_position=case.token_position[rows],
            token_request=np.zeros(count, np.int32),
            cu_tokens=np.array([0, count], np.int32),
            page_table=case.page_table[request : request + 1],
        )
        np.testing.assert_array_equal(
            run_attention(backend, alone, *caches), together[rows], err_msg=f"{request=} {shape=}"
        )


def check_schedule(backend: Backend, shape: ScheduleShape) -> None:
    """Confidence, schedule, packing and report equal the core bit for bit."""
    case = make_schedule(shape)
    outputs = run_schedule(backend, case)
    for name, expected in core_schedule(case).items():
        np.testing.assert_array_equal(outputs[name], expected, err_msg=f"{name} {shape=}")
