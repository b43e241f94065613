"""The target in PyTorch, a batch of sequences at a time: what generation for training runs on.

An engine gives a token the same bits whatever shares its pass, which costs it most of the matrix units; training data
needs the target's answers and features up to rounding only. Shapes: B slots, T rows of a pass, C positions of a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.graph._rope import rope_tables
from trtllm_dspark.graph.weights import Arrays
from trtllm_dspark.train.operations import rotate_halves

_GROUP = 8
"""Slots of one attention call, as long as its longest."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class TorchTarget:
    """Weights of a target, shared by the `Slots` that decode with it.

    Args:
        config: of the target.
        arrays: canonical name -> float32 array, read once each.
        layer_ids: layers whose outputs are the features.
        num_positions: positions of the rotary tables.
        bfloat16: linear layers, K, V and attention in bfloat16. The residual stream, norms and logits stay in float32:
            logits that are rounded to eight bits tie.
    """

    def __init__(
        self, config: ModelConfig, arrays: Arrays, layer_ids: Sequence[int], num_positions: int, *, bfloat16: bool
    ) -> None:
        self.config, self.layer_ids = config, tuple(layer_ids)
        self.dtype = torch.bfloat16 if bfloat16 else torch.float32
        self._weights: dict[str, Tensor] = {}
        self.embedding = _tensor(arrays, "embed.weight")
        self.head = self.embedding if config.tie_word_embeddings else _tensor(arrays, "lm_head.weight")
        for layer in range(config.num_layers):
            self._load(arrays, f"layers.{layer}", ("q", "k", "v"), "qkv")
            self._load(arrays, f"layers.{layer}", ("o",), "o")
            self._load(arrays, f"layers.{layer}", ("gate", "up"), "mlp")
            self._load(arrays, f"layers.{layer}", ("down",), "down")
            norms = ("attn_norm", "mlp_norm", *(("q_norm", "k_norm") if config.qk_norm else ()))
            for name in norms:
                self._weights[f"layers.{layer}.{name}"] = _tensor(arrays, f"layers.{layer}.{name}.weight")
        self._weights["norm"] = _tensor(arrays, "norm.weight")
        cos, sin = rope_tables(config, num_positions)
        self._cos, self._sin = torch.from_numpy(cos), torch.from_numpy(sin)

    def _load(self, arrays: Arrays, prefix: str, parts: Sequence[str], name: str) -> None:
        """Join the matrices that read the same rows."""
        joined = torch.cat([_tensor(arrays, f"{prefix}.{part}.weight") for part in parts])
        self._weights[f"{prefix}.{name}"] = joined.to(self.dtype)
        if f"{prefix}.{parts[0]}.bias" in arrays:
            bias = torch.cat([_tensor(arrays, f"{prefix}.{part}.bias") for part in parts])
            self._weights[f"{prefix}.{name}.bias"] = bias.to(self.dtype)

    @torch.no_grad()
    def run(self, ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run the decoder layers.

        Args:
            ids: [T] int64.
            positions: [T] int64.
            attend: layer, queries [T, H, D] scaled and rotated, keys [T, Hkv, D] rotated, values -> [T, H D].

        Returns:
            The last layer's rows [T, d] before the final norm, and the features [T, m d].
        """
        config, shape = self.config, (len(ids), -1, self.config.head_dim)
        eps, width = config.rms_norm_eps, config.head_dim
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        sizes = [config.num_heads * width, config.num_kv_heads * width, config.num_kv_heads * width]
        x = self.embedding[ids]
        outputs: dict[int, Tensor] = {}
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            normed = self._norm(x, f"{name}.attn_norm", eps)
            q, k, v = (part.float().view(shape) for part in torch.split(self._linear(normed, f"{name}.qkv"), sizes, -1))
            if config.qk_norm:
                q, k = self._norm(q, f"{name}.q_norm", eps), self._norm(k, f"{name}.k_norm", eps)
            rotated = rotate_halves(q, cos, sin) * (1 / math.sqrt(width)), rotate_halves(k, cos, sin)
            attended = attend(layer, *(part.to(self.dtype) for part in (*rotated, v)))
            x = x + self._linear(attended, f"{name}.o")
            gate, up = self._linear(self._norm(x, f"{name}.mlp_norm", eps), f"{name}.mlp").chunk(2, -1)
            x = x + self._linear(F.silu(gate) * up, f"{name}.down")
            if layer in self.layer_ids:
                outputs[layer] = x
        features = torch.cat([outputs[layer] for layer in self.layer_ids], -1) if self.layer_ids else x[:, :0]
        return x, features

    @torch.no_grad()
    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [T, V] of the last layer's rows."""
        return F.linear(self._norm(rows, "norm", self.config.rms_norm_eps), self.head)

    def _norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._weights[name], eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x.to(self.dtype), self._weights[name], self._weights.get(f"{name}.bias"))


class Slots:
    """K and V of a batch of sequences.

    Args:
        target: whose they are.
        num_slots: B.
        num_positions: C.
    """

    def __init__(self, target: TorchTarget, num_slots: int, num_positions: int) -> None:
        config = target.config
        shape = (num_slots, config.num_kv_heads, num_positions, config.head_dim)
        self._target, self._every = target, torch.arange(num_slots)
        # Zeros: what was never written is read under the mask, where a NaN would still spread.
        self._keys = [torch.zeros(shape, dtype=target.dtype) for _ in range(config.num_layers)]
        self._values = [torch.zeros(shape, dtype=target.dtype) for _ in range(config.num_layers)]

    def begin(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        """Start sequences.

        Args:
            slots: one a prompt.
            prompts: token ids, each shorter than a slot.

        Returns:
            The logits [len(prompts), V] behind each prompt, and the features [L, m d] of each.
        """
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.from_numpy(np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts]))
        positions = torch.cat([torch.arange(length) for length in lengths])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = zip(slots, lengths, *(torch.split(rows, lengths) for rows in (q, k, v)), strict=True)
            outputs = []
            for slot, length, queries, keys, values in parts:
                self._keys[layer][slot, :, :length] = keys.transpose(0, 1)
                self._values[layer][slot, :, :length] = values.transpose(0, 1)
                q_heads, k_heads, v_heads = (rows.transpose(0, 1)[None] for rows in (queries, keys, values))
                out = F.scaled_dot_product_attention(
                    q_heads, k_heads, v_heads, is_causal=True, scale=1.0, enable_gqa=True
                )
                outputs.append(out[0].transpose(0, 1).reshape(length, -1))
            return torch.cat(outputs)

        rows, features = self._target.run(ids, positions, attend)
        last = torch.tensor(lengths).cumsum(0) - 1
        return self._target.logits(rows[last]), list(torch.split(features, lengths))

    def extend(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token to every slot.

        Args:
            ids: [B] int64; any in a slot without a sequence, whose length is 0.
            lengths: [B] int64, tokens in each slot before.

        Returns:
            The logits [B, V] and the features [B, m d].
        """
        config = self._target.config
        groups = config.num_heads // config.num_kv_heads
        shape = (config.num_kv_heads, groups, config.head_dim)
        masks = [
            _behind(part, self._target.dtype).expand(-1, config.num_kv_heads, groups, -1)
            for part in torch.split(lengths, _GROUP)
        ]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[self._every, :, lengths], values[self._every, :, lengths] = k, v
            # The heads of a group are the rows of one product.
            parts = zip(*(torch.split(rows, _GROUP) for rows in (q.view(-1, *shape), keys, values)), masks, strict=True)
            outputs = [
                F.scaled_dot_product_attention(
                    queries, k[:, :, : mask.shape[-1]], v[:, :, : mask.shape[-1]], attn_mask=mask, scale=1.0
                )
                for queries, k, v, mask in parts
            ]
            return torch.cat(outputs).reshape(len(ids), -1)

        rows, features = self._target.run(ids, lengths, attend)
        return self._target.logits(rows), features


def _behind(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [B, 1, 1, C] of what lies behind each slot's newest token."""
    places = torch.arange(int(lengths.max()) + 1)
    mask = torch.zeros(len(lengths), 1, 1, len(places), dtype=dtype)
    return mask.masked_fill_(places > lengths[:, None, None, None], float("-inf"))


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.array(arrays[name], np.float32))
