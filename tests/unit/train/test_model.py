"""The packed PyTorch model equals the reference, block by block, and its losses equal the paper's equations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trtllm_dspark.checkpoint import Checkpoint, load_drafter
from trtllm_dspark.reference.heads import confidence, first_state, heads_from_arrays, markov_bias
from trtllm_dspark.reference.models import drafter_block, drafter_context, target_forward
from trtllm_dspark.train.data import BatchConfig, Sampler, Share, collate
from trtllm_dspark.train.features import Captured
from trtllm_dspark.train.layers import Frozen
from trtllm_dspark.train.loss import Alphas, losses
from trtllm_dspark.train.model import predict
from trtllm_dspark.train.parameters import from_arrays
from trtllm_dspark.train.responses import Response

GAMMA, DRAFT_IDS = 5, np.arange(0, 256, 2)


def exact_capture(target: Checkpoint, response: Response, layers: tuple[int, ...], draft_ids: np.ndarray) -> Captured:
    """Return what the target says in float64, with every token's probability."""
    ids = response.token_ids[:-1]
    out = target_forward(target.config, target.arrays, ids, feature_layer_ids=layers)
    logits = out.logits[response.response_start - 1 :]
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    top_ids = np.broadcast_to(draft_ids, (len(logits), len(draft_ids)))
    return Captured(out.features, np.ones((len(ids), 1)), top_ids, probs[:, draft_ids])


def paper_losses(target, config, arrays, responses, share, draft_ids, decay, alphas):
    """Return (total, ce, l1, bce) of DSpark paper, section 3.3, one slot at a time in float64."""
    heads = heads_from_arrays(config, arrays)
    sums, weight_sum = np.zeros(3), 0.0
    heads = replace(heads, w2=None if heads.w2 is None else heads.w2[draft_ids])
    for index, anchors in zip(share.indices, share.anchors, strict=True):
        response = responses[index]
        ids = response.token_ids
        out = target_forward(target.config, target.arrays, ids, feature_layer_ids=config.target_layer_ids)
        for anchor in sorted(set(map(int, anchors))):
            context = drafter_context(config, arrays, out.features[:anchor])
            block = drafter_block(
                config, arrays, context, ids[anchor], target_arrays=target.arrays, draft_token_ids=draft_ids
            )
            count = min(GAMMA, len(ids) - 1 - anchor)
            following = np.asarray(ids[anchor + 1 : anchor + 1 + GAMMA])
            padded = np.concatenate([following, np.zeros(GAMMA - len(following), np.int64)])
            certainty = confidence(heads, block.hidden, ids[anchor], padded) if config.confidence else None
            state = first_state(heads)
            for k in range(count):
                bias, state = markov_bias(heads, state, ids[anchor + k], block.hidden[k])
                logits = block.base_logits[k] + bias
                draft = np.zeros(256)
                e = np.exp(logits - logits.max())
                draft[draft_ids] = e / e.sum()
                teacher = np.exp(out.logits[anchor + k] - out.logits[anchor + k].max())
                teacher /= teacher.sum()
                weight = np.exp(-k / decay)
                l1 = np.abs(draft - teacher).sum()
                accept = 1 - l1 / 2
                label = ids[anchor + k + 1]
                ce = -np.log(draft[label]) if label in draft_ids else 0.0
                c = certainty[k]
                bce = -(accept * np.log(c) + (1 - accept) * np.log(1 - c))
                sums += weight * np.array([ce, l1, bce])
                weight_sum += weight
    ce, l1, bce = sums / weight_sum
    return np.array([alphas.cross_entropy * ce + alphas.l1 * l1 + alphas.confidence * bce, ce, l1, bce])


def test_losses_equal_the_papers_equations(target: Checkpoint, drafter_dir: Path, responses: list[Response]) -> None:
    drafter = load_drafter(drafter_dir, target.config)
    config, alphas = drafter.config, Alphas()
    batch = BatchConfig(4, 6, GAMMA, config.mask_token_id, decay=4.0, sample_positions=False, seed=3)
    shares = Sampler(responses, batch, 1).step(1)
    captured = [exact_capture(target, responses[i], config.target_layer_ids, DRAFT_IDS) for i in shares[0].indices]
    to_draft = np.full(256, -1)
    to_draft[DRAFT_IDS] = np.arange(len(DRAFT_IDS))
    total = float(shares[0].weights.sum(dtype=np.float64))
    blocks, targets = collate(shares[0], responses, captured, batch, to_draft, total)
    parameters = {name: value.double() for name, value in from_arrays(config, drafter.arrays, DRAFT_IDS).items()}
    frozen = Frozen.of(
        torch.from_numpy(target.arrays["embed.weight"]).double(),
        torch.from_numpy(target.arrays["lm_head.weight"][DRAFT_IDS]).double(),
        config.backbone,
        64,
    )
    blocks = type(blocks)(blocks.features.double(), *(getattr(blocks, n) for n in list(blocks.__slots__)[1:]))
    predictions = predict(parameters, frozen, config, blocks)
    ours = losses(predictions, targets, alphas)
    expected = paper_losses(target, config, drafter.arrays, responses, shares[0], DRAFT_IDS, 4.0, alphas)
    got = [float(value) for value in (ours.total, ours.cross_entropy, ours.l1, ours.confidence)]
    np.testing.assert_allclose(got, expected, rtol=2e-5)


@pytest.mark.parametrize("vocab", [7, 40])
def test_loss_gradient_equals_autograd(vocab: int) -> None:
    torch.manual_seed(0)
    n = 12
    from trtllm_dspark.train.loss import Targets
    from trtllm_dspark.train.model import Predictions

    logits = (3 * torch.randn(n, vocab, dtype=torch.float32)).requires_grad_()
    teacher = torch.softmax(3 * torch.randn(n, vocab), -1)
    labels = torch.randint(0, vocab, (n,))
    labels[3] = -1
    weights = torch.rand(n)
    targets = Targets(
        torch.arange(vocab).expand(n, vocab), teacher, labels, weights, torch.zeros(n, dtype=torch.int64), 5.0
    )
    ours = losses(Predictions(logits, logits, None), targets, Alphas(0.3, 0.7, 1.0)).total
    (grad,) = torch.autograd.grad(ours, logits)
    probs = torch.softmax(logits, -1)
    ce = -torch.log(probs.gather(1, labels.clamp_min(0)[:, None])[:, 0]) * (labels >= 0)
    plain = ((0.3 * ce + 0.7 * (probs - teacher).abs().sum(-1)) * weights / 5.0).sum()
    (expected,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


def test_drawn_positions_have_the_weights_expectation(responses: list[Response]) -> None:
    counts, weights = np.zeros(GAMMA), np.zeros(GAMMA)
    drawn = BatchConfig(6, 20, GAMMA, 3, decay=2.0, sample_positions=True, seed=0)
    weighed = BatchConfig(6, 20, GAMMA, 3, decay=2.0, sample_positions=False, seed=0)
    for step in range(1, 201):
        for config, sums in ((drawn, counts), (weighed, weights)):
            for share in Sampler(responses, config, 2).step(step):
                sums += np.bincount(share.rows % GAMMA, share.weights, GAMMA)
    np.testing.assert_allclose(counts, weights, rtol=4 / np.sqrt(counts.min()))


__all__ = ["Share"]
