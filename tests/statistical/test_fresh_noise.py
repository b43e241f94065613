"""A position that is drafted again needs fresh noise: with reused noise an old confidence knows the new draft token.

Appendix A, spread over three rounds. Rounds 1 and 2 verify nothing; round 1's c_4 is high only if its third draft token
was A, and the budget of round 3, whose first draft token stands at the same position, comes from it.
"""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark import _core

TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)
STEP_TIME = np.array([0, 1, 3.5, 3.5, 3.5, 3.5], np.float32)
"""Three tokens with survival 0.8 do not pay, a fourth with 0.72 does."""


def confidences(third_token: int) -> np.ndarray:
    return np.array([[0.8, 1.0, 1.0, 0.9 if third_token == 0 else 0.0]], np.float32)


def third_emitted_law(*, reused: bool) -> np.ndarray:
    """Return the law of the token at the third position, with every branch integrated."""
    law = np.zeros(2)
    for old, fresh in np.ndindex(2, 2):
        drafted = old if reused else fresh
        budget, _ = _core.verify_budget(confidences(old), step_time_us=STEP_TIME)
        chosen = _core.schedule_prefixes(
            "stale_topk", num_requests=1, max_draft_len=4, confidence=confidences(drafted), budget=budget
        )
        chance = DRAFT[old] * DRAFT[fresh]
        if chosen.verify_len[0] == 0:
            law += chance * np.array(TARGET)
            continue
        accepted = min(1.0, TARGET[drafted] / DRAFT[drafted])
        law[drafted] += chance * accepted
        law[0] += chance * (1 - accepted)  # the residual of p over q is A alone
    return law


def test_fresh_draft_noise_keeps_the_law_under_a_stale_budget() -> None:
    assert third_emitted_law(reused=False) == pytest.approx(TARGET, abs=1e-12)


def test_reused_draft_noise_would_bias_a_stale_budget() -> None:
    assert third_emitted_law(reused=True) == pytest.approx((0.85, 0.15), abs=1e-12)


@pytest.mark.parametrize(("acceptance", "agreement"), [("rejection", 0.5), ("coupled", 1.0)])
def test_core_redrafts_a_position_with_fresh_noise(acceptance: str, agreement: float) -> None:
    """Flat laws over two tokens, drafted from anchors 10, 11 and 12: what falls on position 13 each time."""
    size = 4000
    heads = _core.DraftHeads(vocab_size=2, draft_vocab_size=2, kind="none")
    sampling = _core.Sampling(np.ones(size, np.float32), np.arange(size, dtype=np.uint64))
    drafts = [
        _core.draft_chain(
            heads, np.zeros((size, 3, 2), np.float32), np.zeros(size, np.int64), np.full(size, anchor), sampling,
            acceptance=acceptance,
        ).tokens[:, 12 - anchor]
        for anchor in (10, 11, 12)
    ]  # fmt: skip
    for first, second in ((0, 1), (0, 2), (1, 2)):
        share = np.mean(drafts[first] == drafts[second])
        assert abs(share - agreement) < 5 * 0.5 / np.sqrt(size)
