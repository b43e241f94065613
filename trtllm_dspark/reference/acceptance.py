"""What becomes of a draft, given the target's laws: greedy, rejection and coupled acceptance in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_dspark.reference.sampling import Law, invert, race


def acceptance_probability(target: Law, draft: Law, token: int) -> float:
    """Return min(1, p(x) / q(x)) of a drafted token x.

    Source: Leviathan et al. 2023, section 2.3.
    """
    return min(1.0, float(target[token] / draft[token]))


def residual_law(target: Law, draft: Law) -> Law:
    """Return the law of the token that replaces a rejected one: max(p - q, 0), normalised.

    When q covers p everywhere nothing can be rejected; the target's own law stands in for the empty residual.
    """
    positive = np.maximum(target - draft, 0.0)
    total = positive.sum()
    return np.asarray(positive / total) if total > 0 else target


def accept_greedy(best_tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return the emitted tokens: drafts while they equal the target's best token of their row, then that best token.

    Args:
        best_tokens: [ell + 1] argmax of each target row, the anchor's row first.
        drafts: [ell] draft tokens.
    """
    emitted = []
    for best, draft in zip(best_tokens, drafts, strict=False):
        emitted.append(best)
        if draft != best:
            return emitted
    return [*emitted, best_tokens[-1]]


def accept_rejection(
    target_laws: Sequence[Law],
    draft_laws: Sequence[Law],
    drafts: Sequence[int],
    accept_uniforms: Sequence[float],
    emit_uniform: float,
) -> list[int]:
    """Return the emitted tokens of standard speculative sampling.

    Args:
        target_laws: [ell + 1][V], the anchor's row first.
        draft_laws: [>= ell][V] laws the drafts were really drawn from.
        drafts: [ell] draft tokens.
        accept_uniforms: [>= ell] numbers in [0, 1), independent of those the drafts were drawn with.
        emit_uniform: number in [0, 1) for the replacement or the bonus token.

    Source: Leviathan et al. 2023, Algorithm 1.
    """
    for step, token in enumerate(drafts):
        target, draft = target_laws[step], draft_laws[step]
        if accept_uniforms[step] >= acceptance_probability(target, draft, token):
            return [*drafts[:step], invert(residual_law(target, draft), emit_uniform)]
    return [*drafts, invert(target_laws[len(drafts)], emit_uniform)]


def accept_coupled(target_laws: Sequence[Law], drafts: Sequence[int], exponentials: Sequence[Law]) -> list[int]:
    """Return the emitted tokens of the coupled mode: what the target draws with its own noise, while drafts agree.

    The drafter raced over the same exponentials, so it often guesses the winner; the output is a function of the
    target's laws and the noise alone.

    Args:
        target_laws: [ell + 1][V], the anchor's row first.
        drafts: [ell] draft tokens.
        exponentials: [ell + 1][V] noise of each position.

    Source: Daliri et al. 2024.
    """
    winners = [race(law, noise) for law, noise in zip(target_laws, exponentials, strict=False)]
    return accept_greedy(winners, drafts)
