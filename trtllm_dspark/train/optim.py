"""Muon for the matrices of the layers, AdamW for everything else; all state is plain tensors.

Muon: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), scaled to AdamW's update size
(Liu et al., "Muon is scalable for LLM training", 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS = ((8.2872, -23.5959, 17.3004), (4.1071, -2.9478, 0.5448), (3.9487, -2.9089, 0.5518), (3.3184, -2.4885, 0.51))
"""Coefficients of p(X) = aX + bX'X + c(X'X)^2 that drive singular values to 1 (Amsel et al., "The Polar Express")."""
_PIECE = 65536
"""Numbers of a parameter that are updated at once."""


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Step sizes at the top of the schedule."""

    matrix_lr: float = 2e-3
    vector_lr: float = 6e-4
    head_lr: float = 5e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8


class Optimizer:
    """Updates parameters in place.

    Args:
        parameters: canonical name -> tensor.
        config: step sizes.
        executor: matrices are independent and updated side by side.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig, executor: Executor) -> None:
        self._parameters = parameters
        self._config = config
        self._executor = executor
        self.state: dict[str, Tensor] = {}
        for name, value in parameters.items():
            kinds = ("momentum",) if _is_matrix(name, value) else ("first", "second")
            for kind in kinds:
                self.state[f"{name}/{kind}"] = torch.zeros_like(value)

    def step(self, shares: Sequence[Mapping[str, Tensor]], number: int, scale: float) -> None:
        """Apply one update.

        Args:
            shares: name -> gradient, of each share of the step; they are added in this order.
            number: step, from 1, for AdamW's bias correction.
            scale: factor of the schedule, 0..1.
        """
        names = sorted(self._parameters, key=lambda name: -self._parameters[name].numel())
        list(
            self._executor.map(lambda name: self._update(name, [grads[name] for grads in shares], number, scale), names)
        )

    @torch.no_grad()
    def _update(self, name: str, parts: Sequence[Tensor], number: int, scale: float) -> None:
        config, value = self._config, self._parameters[name]
        if parts[0].is_sparse:
            # One dense gradient, and not one a share.
            indices, rows = (torch.cat(tensors) for tensors in zip(*map(_entries, parts), strict=True))
            parts = [torch.zeros_like(value).index_add_(0, indices, rows)]
        flat = [part.reshape(-1) for part in parts]
        if _is_matrix(name, value):
            momentum = self.state[f"{name}/momentum"].view(-1)
            update = torch.empty_like(value)
            for piece in _pieces(value):
                slope = _sum(flat, piece, value.dtype)
                momentum[piece].mul_(config.momentum).add_(slope)
                torch.add(slope, momentum[piece], alpha=config.momentum, out=update.view(-1)[piece])
            update = orthogonalise(update)
            value.add_(update, alpha=-config.matrix_lr * scale * 0.2 * max(value.shape) ** 0.5)
            return
        first, second = self.state[f"{name}/first"].view(-1), self.state[f"{name}/second"].view(-1)
        beta1, beta2 = config.betas
        lr = scale * (config.head_lr if name.startswith("markov.w") else config.vector_lr)
        for piece in _pieces(value):
            slope = _sum(flat, piece, value.dtype)
            first[piece].lerp_(slope, 1 - beta1)
            second[piece].mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
            size = second[piece].div(1 - beta2**number).sqrt_().add_(config.eps)
            value.view(-1)[piece].addcdiv_(first[piece], size, value=-lr / (1 - beta1**number))


def _pieces(value: Tensor) -> list[slice]:
    """Divide a tensor's numbers, so that all operations on a piece but the first find it in the processor's cache."""
    return [slice(start, start + _PIECE) for start in range(0, value.numel(), _PIECE)]


def _sum(parts: Sequence[Tensor], piece: slice, dtype: torch.dtype) -> Tensor:
    """Add a piece of gradients in order."""
    total = parts[0][piece].to(dtype, copy=True)
    for part in parts[1:]:
        total += part[piece]
    return total


def _entries(sparse: Tensor) -> tuple[Tensor, Tensor]:
    return sparse._indices()[0], sparse._values()


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrix: same singular vectors, singular values near 1.

    Works on the Gram matrix of the short side, so that the long side costs two products whatever the number of steps.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    wide = wide / (wide.norm() * 1.02 + 1e-12)
    gram = wide @ wide.t()
    total = factor = _step(gram, *_STEPS[0])
    for coefficients in _STEPS[1:]:
        gram = factor @ gram @ factor
        gram = (gram + gram.t()) / 2
        factor = _step(gram, *coefficients)
        total = factor @ total
    result: Tensor = total @ wide
    return result if matrix.shape[0] <= matrix.shape[1] else result.t()


def _step(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
    factor.diagonal().add_(a)
    return factor


def _is_matrix(name: str, value: Tensor) -> bool:
    return value.ndim == 2 and not name.startswith(("markov.", "confidence."))
