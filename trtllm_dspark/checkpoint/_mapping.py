"""Translate a checkpoint's tensor names, so that each tensor is used exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from trtllm_dspark.checkpoint.arrays import Array, LazyArray, LazyArrays
from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.errors import CheckpointError

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "q.weight": "self_attn.q_proj.weight",
    "k.weight": "self_attn.k_proj.weight",
    "v.weight": "self_attn.v_proj.weight",
    "q.bias": "self_attn.q_proj.bias",
    "k.bias": "self_attn.k_proj.bias",
    "v.bias": "self_attn.v_proj.bias",
    "o.weight": "self_attn.o_proj.weight",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "gate.weight": "mlp.gate_proj.weight",
    "up.weight": "mlp.up_proj.weight",
    "down.weight": "mlp.down_proj.weight",
}
"""Canonical name of a layer's tensor -> its name in Hugging Face and DeepSpec files."""


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one decoder layer's tensors by canonical name (without `layers.{l}.`)."""
    d, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (d,),
        "q.weight": (q_size, d),
        "k.weight": (kv_size, d),
        "v.weight": (kv_size, d),
        "o.weight": (d, q_size),
        "mlp_norm.weight": (d,),
        "gate.weight": (ffn, d),
        "up.weight": (ffn, d),
        "down.weight": (d, ffn),
    }
    if config.attention_bias:
        shapes |= {"q.bias": (q_size,), "k.bias": (kv_size,), "v.bias": (kv_size,)}
    if config.qk_norm:
        shapes |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    return shapes


class TensorMapper:
    """Moves tensors from a checkpoint's names to canonical names and notices what is left or missing."""

    def __init__(self, path: Path, tensors: Mapping[str, LazyArray]) -> None:
        self._path = path
        self._left = dict(tensors)
        self._mapped: dict[str, LazyArray] = {}

    def __contains__(self, source: str) -> bool:
        return source in self._left

    def take(
        self,
        source: str,
        canonical: str,
        shape: tuple[int, ...],
        convert: Callable[[Array], Array] | None = None,
        stored_shape: tuple[int, ...] | None = None,
    ) -> None:
        """Map tensor `source` to `canonical`.

        Args:
            source: name in the checkpoint.
            canonical: name in this package.
            shape: canonical shape.
            convert: turns the stored values into the canonical ones; identity when None.
            stored_shape: shape expected in the file, when it differs from `shape`.

        Raises:
            CheckpointError: the tensor is missing or has another shape.
        """
        tensor = self._left.pop(source, None)
        if tensor is None:
            raise CheckpointError(f"{self._path} lacks tensor {source}; the checkpoint is incomplete")
        expected = shape if stored_shape is None else stored_shape
        if tensor.shape != expected:
            raise CheckpointError(
                f"tensor {source} in {self._path} has shape {list(tensor.shape)}, "
                f"its configuration calls for {list(expected)}"
            )
        self._mapped[canonical] = tensor if convert is None else tensor.map(convert, shape)

    def take_layers(self, config: ModelConfig, prefix: str = "") -> None:
        """Map the decoder layers `{prefix}layers.{l}.*`."""
        for layer in range(config.num_layers):
            for name, shape in layer_shapes(config).items():
                self.take(f"{prefix}layers.{layer}.{LAYER_NAMES[name]}", f"layers.{layer}.{name}", shape)

    def alias(self, canonical: str, other: str) -> None:
        """Give a tensor that is mapped already a second canonical name."""
        self._mapped[other] = self._mapped[canonical]

    def mapped(self, canonical: str) -> LazyArray:
        """Return a tensor that is mapped already."""
        return self._mapped[canonical]

    def drop(self, source: str) -> LazyArray | None:
        """Leave tensor `source` out on purpose and return it; None when the checkpoint does not have it."""
        return self._left.pop(source, None)

    def names(self) -> tuple[str, ...]:
        """Return the names that are not mapped yet."""
        return tuple(self._left)

    def finish(self) -> LazyArrays:
        """Return the mapped tensors.

        Raises:
            CheckpointError: a tensor was not used; ignoring it could change what the model computes.
        """
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{self._path} holds tensor {', '.join(names[:3])}{more}, which this architecture does not have; "
                "the checkpoint is of another kind than its configuration says"
            )
        return LazyArrays(self._mapped)
