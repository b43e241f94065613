"""Operations whose derivative PyTorch would make of many small ones, each over all numbers once more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x over its last axis, in the weight's precision."""
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of [rows, heads, D] by angles of cosine and sine [rows, 1, D / 2]."""
    rotated: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def attend(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, hidden_keys: Tensor) -> Tensor:
    """Let rows see their sequence's context and their block's own slots.

    Args:
        q: [S, Hkv, A, rows, D], scaled.
        k: [S, Hkv, C, D]; `v` alike.
        v: see k.
        own_k: [S, Hkv, A, own, D]; `own_v` alike.
        own_v: see own_k.
        hidden_keys: [S, 1, A, 1, C], true where a block must not look.

    Returns:
        As q.
    """
    out: Tensor = _Attention.apply(q, k, v, own_k, own_v, hidden_keys)  # type: ignore[no-untyped-call]
    return out


class _RmsNorm(torch.autograd.Function):
    """See `rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(weight.dtype)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = wide * inverse
        ctx.dtype = x.dtype
        ctx.save_for_backward(normed, weight, inverse)
        result: Tensor = normed * weight
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, weight, inverse = ctx.saved_tensors
        slopes = grads[0] * normed
        mean = (slopes @ weight).div_(weight.shape[0])[..., None]
        grad = (grads[0] * weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return grad.to(ctx.dtype), slopes.flatten(0, -2).sum(0), None


class _Rotation(torch.autograd.Function):
    """See `rotate_halves`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x.chunk(2, -1)
    result = torch.empty_like(x)
    low, high = result.chunk(2, -1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=high).addcmul_(first, sin, value=direction)
    return result


class _Attention(torch.autograd.Function):
    """See `attend`.

    A row's weights lie side by side, [seen, own]. Keys and values of the context get rows of zeros for the own ones,
    which spares taking the two apart for every product.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, hidden_keys: Tensor) -> Tensor:
        length, own = k.shape[2], own_k.shape[3]
        k, v = (F.pad(one, (0, 0, 0, own)) for one in (k, v))
        scores = _shared(q, k.mT)
        scores[..., :length].masked_fill_(hidden_keys, float("-inf"))
        scores[..., length:] = q @ own_k.mT
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(q, k, v, own_k, own_v, weights)
        return _shared(weights, v).add_(weights[..., length:] @ own_v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, weights = ctx.saved_tensors
        grad, length = grads[0].contiguous(), k.shape[2] - own_k.shape[3]
        slopes = _shared(grad, v.mT)
        slopes[..., length:] = grad @ own_v.mT
        slopes = torch.ops.aten._softmax_backward_data(slopes, weights, -1, weights.dtype)
        own_slopes, own_weights = slopes[..., length:], weights[..., length:]
        return (
            _shared(slopes, k).add_(own_slopes @ own_k),
            (slopes.flatten(2, 3).mT @ q.flatten(2, 3))[:, :, :length],
            (weights.flatten(2, 3).mT @ grad.flatten(2, 3))[:, :, :length],
            own_slopes.mT @ q,
            own_weights.mT @ grad,
            None,
        )


def _shared(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply [S, Hkv, A, rows, x] by [S, Hkv, x, y]: one product for all blocks of a sequence."""
    return (rows.flatten(2, 3) @ matrix).view(*rows.shape[:4], matrix.shape[-1])
