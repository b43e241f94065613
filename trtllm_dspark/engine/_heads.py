"""`heads.safetensors` -> the core's `DraftHeads`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.graph import read_heads

if TYPE_CHECKING:
    from trtllm_dspark._core import DraftHeads


def load_heads(path: Path, config: DrafterConfig, vocab_size: int) -> DraftHeads:
    """Load the sequential and confidence heads of an engine.

    Args:
        path: the file `graph.write_heads` wrote.
        config: the drafter, with `draft_vocab_size` as built.
        vocab_size: V of the target.

    Raises:
        EngineError: the file is damaged.
        ShapeError: its tensors contradict each other or the configuration.
        NativeError: an id is outside the vocabulary, or a weight is not finite.
    """
    # Engines without a drafter need no native library.
    from trtllm_dspark._core import DraftHeads

    tensors = read_heads(path)
    return DraftHeads(
        vocab_size=vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        kind=config.markov_head,
        w1=tensors.get("markov.w1"),
        w2=tensors.get("markov.w2"),
        w1_scale=tensors.get("markov.w1.scale"),
        w2_scale=tensors.get("markov.w2.scale"),
        gate_weight=tensors.get("markov.gate.weight"),
        gate_bias=tensors.get("markov.gate.bias"),
        rnn_weight=tensors.get("markov.rnn.weight"),
        rnn_bias=tensors.get("markov.rnn.bias"),
        confidence_weight=tensors.get("confidence.weight"),
        confidence_bias=tensors.get("confidence.bias"),
        confidence_with_markov=config.confidence_with_markov,
        d2t=tensors.get("d2t"),
    )
