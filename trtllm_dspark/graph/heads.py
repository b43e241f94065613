"""`heads.safetensors`: the sequential and confidence heads, which the core runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.checkpoint.int8_rows import quantise_rows
from trtllm_dspark.checkpoint.safetensors_io import read_file, write_file
from trtllm_dspark.errors import CheckpointError, EngineError
from trtllm_dspark.graph._quantize import FloatArray
from trtllm_dspark.graph.matrices import WeightDtype
from trtllm_dspark.graph.weights import Arrays, Weights

HEADS_FILE = "heads.safetensors"


def write_heads(
    directory: Path,
    config: DrafterConfig,
    arrays: Arrays,
    *,
    vocab_size: int,
    draft_token_ids: NDArray[np.int64] | None = None,
    weight_dtype: WeightDtype = "int8",
) -> Path:
    """Write `heads.safetensors` into `directory`.

    Tensors: markov.w1 [V, r], markov.w2 [Vd, r] (int8 with `.scale` [rows] float32, or float32), the gated or recurrent
    head's weight and bias, confidence.weight, confidence.bias [1], and d2t [Vd] int64 target ids when the draft
    vocabulary is reduced.

    Args:
        directory: an existing directory.
        config: the drafter.
        arrays: canonical names -> float32 arrays.
        vocab_size: V of the target.
        draft_token_ids: [Vd] target ids the drafter proposes from; None = all.
        weight_dtype: float32 keeps everything; otherwise the two Markov factors are int8 with one scale a row.

    Returns:
        The file written.

    Raises:
        ShapeError: a tensor is missing or has another shape than the configuration says.
    """
    tensors: dict[str, NDArray[Any]] = dict(
        head_arrays(config, arrays, vocab_size=vocab_size, draft_token_ids=draft_token_ids)
    )
    for name in ("markov.w1", "markov.w2") if weight_dtype != "float32" else ():
        if name in tensors:
            tensors[name], tensors[f"{name}.scale"] = quantise_rows(tensors[name])
    if draft_token_ids is not None:
        tensors["d2t"] = np.asarray(draft_token_ids, np.int64)
    path = directory / HEADS_FILE
    write_file(path, tensors)
    return path


def head_arrays(
    config: DrafterConfig, arrays: Arrays, *, vocab_size: int, draft_token_ids: NDArray[np.int64] | None
) -> dict[str, FloatArray]:
    """Return the heads' weights in float32 under the names `write_heads` documents, `markov.w2` cut to the draft ids.

    Raises:
        ShapeError: a tensor is missing or has another shape than the configuration says.
    """
    weights = Weights(arrays, "float32")
    rank, size = config.markov_rank, config.backbone.hidden_size
    tensors: dict[str, FloatArray] = {}
    if config.markov_head != "none":
        for name in ("markov.w1", "markov.w2"):
            factor = weights.read(f"{name}.weight", (vocab_size, rank))
            if name == "markov.w2" and draft_token_ids is not None:
                factor = factor[draft_token_ids]
            tensors[name] = factor
    shapes = {"gated": ("markov.gate", (rank, size + rank)), "rnn": ("markov.rnn", (3 * rank, 2 * rank + size))}
    if config.markov_head in shapes:
        name, shape = shapes[config.markov_head]
        tensors[f"{name}.weight"] = weights.read(f"{name}.weight", shape)
        if f"{name}.bias" in arrays:
            tensors[f"{name}.bias"] = weights.read(f"{name}.bias", shape[:1])
    if config.confidence:
        width = size + rank if config.confidence_with_markov else size
        tensors["confidence.weight"] = weights.read("confidence.weight", (width,))
        if "confidence.bias" in arrays:
            tensors["confidence.bias"] = weights.read("confidence.bias", (1,))
    return tensors


def read_heads(path: Path) -> dict[str, NDArray[Any]]:
    """Read the tensors that `write_heads` wrote, in their stored types.

    Raises:
        EngineError: the file is damaged.
    """
    try:
        return {name: tensor.read() for name, tensor in read_file(path).items()}
    except CheckpointError as error:
        raise EngineError(f"{path} is damaged ({error}); build the engine again") from error
