"""Models known by their configuration alone: enough to check shapes and sizes, not to build from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from trtllm_dspark.checkpoint._drafter import drafter_shapes
from trtllm_dspark.checkpoint._mapping import layer_shapes
from trtllm_dspark.checkpoint.arrays import LazyArray, LazyArrays
from trtllm_dspark.checkpoint.autoregressive import autoregressive_shapes
from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.checkpoint.drafter import read_drafter
from trtllm_dspark.checkpoint.huggingface import read_target_config
from trtllm_dspark.checkpoint.paths import resolve_path
from trtllm_dspark.checkpoint.types import Checkpoint, CheckpointFile, DrafterCheckpoint
from trtllm_dspark.errors import CheckpointError

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def has_weights(path: str | Path) -> bool:
    """Tell whether a checkpoint path holds more than a configuration."""
    found = resolve_path(path)
    if found.is_dir():
        return any((found / name).is_file() for name in _WEIGHTS) or not (found / "config.json").exists()
    return found.suffix != ".json"


def describe_target(path: str | Path) -> Checkpoint:
    """Read a target's `config.json`, given itself or by its directory; weights and tokenizer are left out.

    Raises:
        CheckpointError: nothing is there, or the model is not one this package runs.
    """
    config_path = _config_path(path)
    config, _ = read_target_config(config_path)
    tables = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": tables, "norm.weight": (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = tables
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()}
    return Checkpoint(config, _without_values(shapes, config_path), (CheckpointFile(config_path),), None, "huggingface")


def describe_drafter(path: str | Path, target: ModelConfig) -> DrafterCheckpoint:
    """Read a drafter's `config.json`, of any dialect; embedding and full-vocabulary head are taken to be the target's.

    Every released drafter ships frozen copies of both, or neither.

    Raises:
        CheckpointError: nothing is there, the drafter is not supported, or it was trained for another target.
    """
    config_path = _config_path(path)
    found = read_drafter(config_path.parent, target, with_weights=False)
    config = found.config
    shapes = autoregressive_shapes(config) if config.autoregressive else drafter_shapes(config, target)
    return DrafterCheckpoint(config, _without_values(shapes, config_path), found.files, found.format)


def _config_path(path: str | Path) -> Path:
    found = resolve_path(path)
    if found.is_dir():
        found = found / "config.json"
    if found.name != "config.json" or not found.is_file():
        raise CheckpointError(f"{found} is not a model's config.json; give that file or its directory")
    return found


def _without_values(shapes: Mapping[str, tuple[int, ...]], path: Path) -> LazyArrays:
    def refuse() -> NoReturn:
        raise CheckpointError(f"{path.parent} has no weights; give the whole model")

    return LazyArrays({name: LazyArray(name, shape, refuse) for name, shape in shapes.items()})
