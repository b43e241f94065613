"""The candidate selection where its sharp bound is not sharp, and where logits tie."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.kernels.backends import SimtBackend
from helpers.kernels.round_cases import RoundShape, make_round
from helpers.kernels.rounds import run_draft

SHAPE = RoundShape(num_requests=1, draft_len=1, vocab=20000, num_candidates=60, head_kind="none", acceptance="greedy")


def _expected(row: np.ndarray, count: int) -> list[int]:
    order = np.lexsort((np.arange(len(row)), -row))
    return sorted(order[:count].tolist())


@pytest.mark.parametrize("kind", ["few_threads_hold_all", "all_equal", "two_levels", "ascending"])
def test_select_candidates_hard_row_equals_sort(backend: SimtBackend, kind: str) -> None:
    ids = np.arange(SHAPE.vocab)
    row = {
        # Thread t of 512 reads ids 8t..8t+7 of every 4,096: 60 threads hold every large logit, far more than the list.
        "few_threads_hold_all": np.where(ids % 4096 < 8 * 60, 100 + ids % 997, 0),
        "all_equal": np.zeros(SHAPE.vocab),
        "two_levels": np.where(ids % 7 == 3, 1.0, -1.0),
        "ascending": ids / 7,
    }[kind].astype(np.float32)
    case = dataclasses.replace(make_round(SHAPE), base_logits=row.reshape(1, 1, -1))
    draft = run_draft(backend, case)
    assert draft["candidates"][0, 0].tolist() == _expected(row, SHAPE.num_candidates)
    assert draft["draft_tokens"][0, 0] == row.argmax()
