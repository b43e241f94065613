"""Tiny random autoregressive drafters, written to disk in this project's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from helpers.tiny_models import TINY_SHAPE, write_directory
from trtllm_dspark.checkpoint.autoregressive import (
    ARCHITECTURES,
    autoregressive_config,
    autoregressive_shapes,
    stored_name,
)
from trtllm_dspark.checkpoint.config import DrafterKind, ModelConfig

KINDS: tuple[DrafterKind, ...] = ("eagle3", "mtp")


def write_autoregressive_drafter(directory: Path, kind: DrafterKind, *, seed: int = 1, **overrides: Any) -> Path:
    """Write a random drafter for a target of TINY_SHAPE and return `directory`."""
    shape = {name: overrides.get(name, value) for name, value in TINY_SHAPE.items()}
    layers = {"eagle3": [0, 1, 2], "mtp": [shape["num_hidden_layers"] - 1]}[kind]
    config = {
        "architectures": [name for name, value in ARCHITECTURES.items() if value == kind],
        "model_type": "qwen3",
        **shape,
        "num_hidden_layers": 1,
        "num_target_layers": shape["num_hidden_layers"],
        "target_layer_ids": layers,
        "block_size": 5 if kind == "eagle3" else 1,
        **overrides,
    }
    model = ModelConfig(
        "qwen3", shape["vocab_size"], shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"],
        shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"], 1e-5, 1e4, 512, False,
    )  # fmt: skip
    drafter = autoregressive_config(
        kind, model, block_size=5, target_layer_ids=tuple(layers), draft_vocab_size=shape["vocab_size"]
    )
    rng = np.random.default_rng(seed)
    tensors = {
        stored_name(name): (
            rng.standard_normal(size) / np.sqrt(size[-1]) if len(size) == 2 else 1 + 0.2 * rng.standard_normal(size)
        ).astype(np.float32)
        for name, size in autoregressive_shapes(drafter).items()
    }
    return write_directory(directory, config, tensors)


def change_config(directory: Path, **fields: Any) -> None:
    """Change fields of a written drafter's configuration; None removes one."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text("utf-8")), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}), "utf-8")
