"""The paper's losses on rows of teacher-forced predictions (DSpark paper, section 3.3).

CE is against the sequence's next token, L1 = sum |p_d - p_t| against the target's distribution, and the confidence
head's BCE against c* = 1 - L1 / 2. The target's distribution is kept as its largest entries: L1 of two distributions is
2 - 2 sum min(p_d, p_t), and an entry that is left out can only miss what is smaller than every one that is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_dspark.train.model import Predictions


@dataclass(frozen=True, slots=True)
class Targets:
    """What the rows should predict.

    Attributes:
        top_ids: [n, K] int64, draft ids of the target's likeliest tokens; 0 with probability 0 fills up.
        top_probs: [n, K] the target's probabilities of them, out of the whole vocabulary.
        labels: [n] int64, draft id of the sequence's next token, -1 where the drafter cannot propose it.
        weights: [n] position weights, 0 for a row without a loss.
        slots: [n] int64, slot of each row in its block.
        total_weight: sum of weights that the losses are divided by.
    """

    top_ids: Tensor
    top_probs: Tensor
    labels: Tensor
    weights: Tensor
    slots: Tensor
    total_weight: float


@dataclass(frozen=True, slots=True)
class Alphas:
    """Shares of the three losses."""

    cross_entropy: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss and its parts, each divided by the total weight.

    Attributes:
        total: scalar to differentiate.
        cross_entropy: without its share; `l1` and `confidence` alike, detached.
        l1: see cross_entropy.
        confidence: see cross_entropy.
        accept: [n] detached 1 - L1 / 2: how likely each row's draft is accepted at temperature 1.
    """

    total: Tensor
    cross_entropy: Tensor
    l1: Tensor
    confidence: Tensor
    accept: Tensor


def losses(predictions: Predictions, targets: Targets, alphas: Alphas) -> Losses:
    """Return the weighted losses of all rows."""
    weights = targets.weights / targets.total_weight
    ce_rows, accept = _DraftLoss.apply(  # type: ignore[no-untyped-call]
        predictions.logits,
        targets.top_ids,
        targets.top_probs,
        targets.labels,
        alphas.cross_entropy * weights,
        alphas.l1 * weights,
    )
    # `_DraftLoss` has its own gradient: its first result is the two weighted losses, row by row.
    total = ce_rows.sum()
    known = (targets.labels >= 0).to(weights.dtype)
    with torch.no_grad():
        l1 = (weights * (2 - 2 * accept)).sum()
        share = alphas.cross_entropy or 1.0
        cross_entropy = ((ce_rows - alphas.l1 * weights * (2 - 2 * accept)) / share * known).sum()
    confidence = total.new_zeros(())
    if predictions.confidence is not None:
        rows = F.binary_cross_entropy_with_logits(predictions.confidence, accept, reduction="none")
        confidence = (rows * weights).sum()
        total = total + alphas.confidence * confidence
    return Losses(total, cross_entropy, l1, confidence.detach(), accept)


class _DraftLoss(torch.autograd.Function):
    """CE and L1 of [n, Vd] logits in two passes over them, forward and backward together."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        top_ids: Tensor,
        top_probs: Tensor,
        labels: Tensor,
        ce_weights: Tensor,
        l1_weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        probs = torch.softmax(logits, -1, dtype=torch.float32)
        # The largest probability is at least 1 / Vd, so its logarithm tells the sum of the exponentials.
        scale = logits.amax(-1).float() - probs.amax(-1).log()
        label_logits = logits.gather(1, labels.clamp_min(0)[:, None])[:, 0].float()
        cross_entropy = torch.where(labels >= 0, scale - label_logits, 0.0)
        chosen = probs.gather(1, top_ids)
        accept = torch.minimum(chosen, top_probs).sum(-1)
        ctx.save_for_backward(probs, top_ids, top_probs, chosen, labels, ce_weights, l1_weights)
        ctx.mark_non_differentiable(accept)
        return ce_weights * cross_entropy + l1_weights * (2 - 2 * accept), accept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probs, top_ids, top_probs, chosen, labels, ce_weights, l1_weights = ctx.saved_tensors
        outer = grads[0]
        ce_weights = torch.where(labels >= 0, ce_weights, 0.0) * outer
        # d L1 / d p = -2 where the drafter gives less than the target; then the softmax's own derivative.
        slopes = (chosen < top_probs) * chosen * (-2 * l1_weights * outer)[:, None]
        # In place: nothing else reads the probabilities, and PyTorch refuses a second call.
        grad = probs.mul_((ce_weights - slopes.sum(-1))[:, None])
        grad.scatter_add_(1, top_ids, slopes)
        grad.scatter_add_(1, labels.clamp_min(0)[:, None], -ce_weights[:, None])
        return grad, None, None, None, None, None
