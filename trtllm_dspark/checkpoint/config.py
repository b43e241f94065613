"""Canonical model descriptions: what every checkpoint format is translated into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Architecture = Literal["llama", "qwen3"]
MarkovHead = Literal["none", "vanilla", "gated", "rnn"]
DrafterKind = Literal["block", "eagle3", "mtp"]
"""`block`: a whole block in one pass (DSpark; DFlash without a sequential head); the others draft token after token."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 style frequency scaling; every field as in the Hugging Face configuration."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary attention with grouped KV heads, SwiGLU."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool = False
    attention_bias: bool = False
    rope_scaling: RopeScaling | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 K and V of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 4


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A DSpark drafter: a parallel backbone over target features, a sequential head, a confidence head.

    Source: DSpark paper, section 3.1. Other kinds are baselines (`checkpoint.autoregressive`).
    """

    backbone: ModelConfig
    block_size: int
    """gamma the drafter was trained with: number of input slots and of draft tokens of a block."""
    target_layer_ids: tuple[int, ...]
    """Ids of the target decoder layers whose *outputs* are the features, in concatenation order."""
    num_target_layers: int
    target_hidden_size: int
    mask_token_id: int
    markov_head: MarkovHead
    markov_rank: int
    confidence: bool
    confidence_with_markov: bool
    draft_vocab_size: int
    """Vd: size of the vocabulary the head proposes from; equals the target's V when it is not reduced."""
    kind: DrafterKind = "block"
    """The other kinds have one layer, no masks and neither a sequential nor a confidence head."""
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def feature_size(self) -> int:
        """Width of one row of target features: number of captured layers times the target's hidden size."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def autoregressive(self) -> bool:
        """Whether it drafts token after token, each from the hidden state of the one before."""
        return self.kind != "block"
