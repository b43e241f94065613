"""ONNX Runtime engines of tiny random models, written from canonical arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from helpers.random_model import TINY, random_arrays
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine.base import ContextBatch, EngineLimits, TokenBatch
from trtllm_dspark.engine.onnxruntime import OnnxRuntimeEngine
from trtllm_dspark.graph import DrafterSource, WeightDtype, write_drafter, write_target

Arrays = dict[str, np.ndarray]

SMALL = replace(TINY, vocab_size=97, hidden_size=64, intermediate_size=128, head_dim=16, max_position_embeddings=1024)
"""Every inner dimension a multiple of 64, so that all weight formats apply."""


def small_drafter(target: ModelConfig = SMALL, **changes: Any) -> DrafterConfig:
    """Return a two-layer drafter of `target` with blocks of five."""
    backbone = replace(
        target, architecture="qwen3", num_layers=2, qk_norm=True, attention_bias=False, rope_scaling=None
    )
    config = DrafterConfig(
        backbone=backbone,
        block_size=5,
        target_layer_ids=(0, 2),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        mask_token_id=3,
        markov_head="vanilla",
        markov_rank=8,
        confidence=True,
        confidence_with_markov=True,
        draft_vocab_size=target.vocab_size,
    )
    return replace(config, **changes)


def drafter_arrays(config: DrafterConfig, rng: np.random.Generator, *, own_tables: bool = False) -> Arrays:
    """Return random canonical arrays; without `own_tables` embedding and head are the target's."""
    arrays = random_arrays(config.backbone, rng)
    if not own_tables:
        arrays = {name: value for name, value in arrays.items() if name not in ("embed.weight", "lm_head.weight")}
    elif "lm_head.weight" not in arrays:
        arrays["lm_head.weight"] = rng.normal(size=arrays["embed.weight"].shape).astype(np.float32)
    size, rank, vocab = config.backbone.hidden_size, config.markov_rank, config.backbone.vocab_size
    extra = {
        "fc.weight": rng.normal(size=(size, config.feature_size)) * 0.2,
        "hidden_norm.weight": rng.uniform(0.5, 1.5, size),
        "markov.w1.weight": rng.normal(size=(vocab, rank)),
        "markov.w2.weight": rng.normal(size=(vocab, rank)),
        "confidence.weight": rng.normal(size=size + (rank if config.confidence_with_markov else 0)),
        "confidence.bias": rng.normal(size=1),
    }
    if config.markov_head in ("gated", "rnn"):
        name, rows, columns = {"gated": ("gate", 1, 1), "rnn": ("rnn", 3, 2)}[config.markov_head]
        extra[f"markov.{name}.weight"] = rng.normal(size=(rows * rank, columns * rank + size)) * 0.3
        extra[f"markov.{name}.bias"] = rng.normal(size=rows * rank)
    return arrays | {name: value.astype(np.float32) for name, value in extra.items()}


@dataclass
class TinyEngine:
    """An engine and what it was made of."""

    engine: OnnxRuntimeEngine
    config: ModelConfig
    arrays: Arrays
    drafter: DrafterConfig | None = None
    drafter_arrays: Arrays | None = None
    draft_token_ids: np.ndarray | None = None

    def target(self, tokens: np.ndarray, start: int = 0, *, slot: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Run one row of tokens and return the logits and features of all of them."""
        rows = np.array([len(tokens)])
        out = self.engine.verify(TokenBatch(tokens, rows, np.array([start]), np.arange(len(tokens)), slot))
        return out.logits, out.features

    def chunks(self, tokens: np.ndarray, sizes: list[int], *, slot: int = 0) -> np.ndarray:
        """Run one request in passes of `sizes` tokens and return the logits of all of them."""
        starts = np.cumsum([0, *sizes[:-1]])
        parts = [self.target(tokens[s : s + n], int(s), slot=slot)[0] for s, n in zip(starts, sizes, strict=True)]
        return np.concatenate(parts)

    def absorb(self, features: np.ndarray, start: int = 0, *, slot: int = 0) -> None:
        """Append context rows of one request."""
        rows = np.asarray(features, np.float32)
        self.engine.absorb(ContextBatch(rows, np.array([len(rows)]), np.array([start]), slot))


def make_engine(
    directory: Path,
    config: ModelConfig = SMALL,
    drafter: DrafterConfig | None = None,
    *,
    weight_dtype: WeightDtype = "float32",
    own_tables: bool = False,
    draft_token_ids: np.ndarray | None = None,
    max_batch_size: int = 4,
    max_seq_len: int = 600,
    max_num_tokens: int = 512,
    max_draft_len: int | None = None,
    num_threads: int = 1,
    seed: int = 0,
) -> TinyEngine:
    """Write the graphs of random models into `directory` and load them."""
    rng = np.random.default_rng(seed)
    arrays = random_arrays(config, rng)
    layers = drafter.target_layer_ids if drafter else ()
    written = write_target(
        directory, config, arrays, max_seq_len=max_seq_len, feature_layer_ids=layers, weight_dtype=weight_dtype
    )
    own: Arrays | None = None
    gamma = 0
    if drafter is not None:
        own = drafter_arrays(drafter, rng, own_tables=own_tables)
        gamma = max_draft_len or drafter.block_size
        if draft_token_ids is not None:
            drafter = replace(drafter, draft_vocab_size=len(draft_token_ids))
        write_drafter(
            directory,
            DrafterSource(drafter, own, config, arrays, written),
            max_seq_len=max_seq_len,
            max_draft_len=gamma,
            draft_token_ids=draft_token_ids,
            weight_dtype=weight_dtype,
        )
    limits = EngineLimits(
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        max_draft_len=gamma,
        vocab_size=config.vocab_size,
        draft_vocab_size=drafter.draft_vocab_size if drafter else 0,
        feature_size=drafter.feature_size if drafter else 0,
        mask_token_id=drafter.mask_token_id if drafter else 0,
        has_drafter=drafter is not None,
    )
    engine = OnnxRuntimeEngine(directory, config, drafter, limits, num_threads=num_threads)
    return TinyEngine(engine, config, arrays, drafter, own, draft_token_ids)
