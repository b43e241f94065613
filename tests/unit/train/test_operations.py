"""Own derivatives equal numeric ones; what bfloat16 adds to a step changes nothing but precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_models import write_drafter

from trtllm_dspark.checkpoint import Checkpoint, load_drafter
from trtllm_dspark.train.data import BFLOAT16_ROWS, BatchConfig, Sampler, collate
from trtllm_dspark.train.features import Captured, compress
from trtllm_dspark.train.layers import Frozen
from trtllm_dspark.train.loss import Alphas, losses
from trtllm_dspark.train.model import predict
from trtllm_dspark.train.operations import attend, rms_norm, rotate_halves
from trtllm_dspark.train.parameters import from_arrays
from trtllm_dspark.train.responses import Response


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_equal_numeric_ones() -> None:
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), [numbers(3, 2, 4), numbers(4)])
    cos, sin = numbers(3, 1, 2).detach(), numbers(3, 1, 2).detach()
    assert torch.autograd.gradcheck(lambda x: rotate_halves(x, cos, sin), [numbers(3, 2, 4)])
    hidden = (torch.arange(5) >= torch.tensor([[0, 1, 5], [2, 3, 4]])[..., None])[:, None, :, None]
    keys = [numbers(2, 2, 5, 4), numbers(2, 2, 5, 4), numbers(2, 2, 3, 2, 4), numbers(2, 2, 3, 2, 4)]
    assert torch.autograd.gradcheck(lambda *args: attend(*args, hidden), [numbers(2, 2, 3, 4, 4), *keys])


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_that_fill_up_do_not_change_losses_and_gradients(
    target: Checkpoint, responses: list[Response], tmp_path: Path, drawn: bool
) -> None:
    drafter = load_drafter(write_drafter(tmp_path, markov_head="vanilla", vocab_size=256), target.config)
    config = drafter.config
    batch = BatchConfig(4, 12, config.block_size, config.mask_token_id, 3.0, drawn)
    (share,) = Sampler(responses, batch, 1).step(1)
    rng = np.random.default_rng(0)
    captured = []
    for index in share.indices:
        length = len(responses[index].token_ids)
        wide = rng.standard_normal((length - 1, config.backbone.hidden_size * len(config.target_layer_ids)))
        rows = length - responses[index].response_start
        top_ids = rng.integers(0, 256, (rows, 4), np.int32)
        captured.append(Captured(*compress(wide.astype(np.float32)), top_ids, np.full((rows, 4), 0.2, np.float16)))
    parameters = {name: value.requires_grad_() for name, value in from_arrays(config, drafter.arrays, None).items()}
    frozen = Frozen.of(
        torch.from_numpy(np.array(target.arrays["embed.weight"])),
        torch.from_numpy(np.array(target.arrays["lm_head.weight"])),
        config.backbone,
        64,
    )
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        blocks, targets = collate(share, responses, captured, batch, None, 7.0, dtype)
        assert blocks.features.dtype == dtype
        if dtype == torch.bfloat16:
            assert len(blocks.features) % BFLOAT16_ROWS == 0
            assert (blocks.context_index.shape[1] + config.block_size) % BFLOAT16_ROWS == 0
            assert not drawn or len(blocks.rows) in (BFLOAT16_ROWS, 2 * BFLOAT16_ROWS, 3 * BFLOAT16_ROWS)
        # The rounding of the features themselves left out.
        blocks = replace(blocks, features=blocks.features.bfloat16().float())
        result = losses(predict(parameters, frozen, config, blocks), targets, Alphas())
        gradients = torch.autograd.grad(result.total, list(parameters.values()))
        found.append([result.total.detach(), *(one.to_dense() for one in gradients)])
    for plain, filled in zip(*found, strict=True):
        torch.testing.assert_close(filled, plain, rtol=1e-4, atol=1e-6)
