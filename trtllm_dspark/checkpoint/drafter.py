"""Read a drafter of any supported dialect."""

from __future__ import annotations

from pathlib import Path

from trtllm_dspark.checkpoint._drafter import build_drafter
from trtllm_dspark.checkpoint._hf_config import Fields
from trtllm_dspark.checkpoint.autoregressive import ARCHITECTURES, load_autoregressive
from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.checkpoint.paths import resolve_path
from trtllm_dspark.checkpoint.safetensors_io import read_json
from trtllm_dspark.checkpoint.specforge import is_specforge, load_specforge
from trtllm_dspark.checkpoint.speculators import is_speculators, load_speculators
from trtllm_dspark.checkpoint.types import DrafterCheckpoint
from trtllm_dspark.errors import CheckpointError


def load_drafter(path: str | Path, target: ModelConfig) -> DrafterCheckpoint:
    """Read a drafter directory and check that it fits `target`.

    Only headers are read; weights come when `DrafterCheckpoint.arrays` is asked for them.

    Args:
        path: a directory with `config.json` and safetensors files, or `package:NAME`.
        target: configuration of the target the drafter will draft for.

    Raises:
        CheckpointError: nothing is there, the drafter is not supported, or it was trained for another target.
    """
    directory = resolve_path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; pass the drafter's directory, which holds config.json as well")
    return read_drafter(directory, target)


def read_drafter(directory: Path, target: ModelConfig, *, with_weights: bool = True) -> DrafterCheckpoint:
    """Read a drafter directory of any dialect; without weights its `arrays` are empty.

    Raises:
        CheckpointError: the drafter is not supported, or it was trained for another target.
    """
    config_path = directory / "config.json"
    values = read_json(config_path)
    if is_speculators(values):
        return load_speculators(directory, values, target, with_weights)
    if is_specforge(values):
        return load_specforge(directory, values, target, with_weights)
    fields = Fields(config_path, values)
    names = fields.names("architectures")
    if names == ("Qwen3DSparkModel",):
        return build_drafter(directory, fields, target, "deepspec", with_weights=with_weights)
    if len(names) == 1 and names[0] in ARCHITECTURES:
        return load_autoregressive(directory, values, target, with_weights)
    raise CheckpointError(
        f"{config_path}: drafter architecture {', '.join(names) or 'none'} is not supported, expected Qwen3DSparkModel "
        f"(DeepSpec), a speculators or a SpecForge DSpark drafter, or {' or '.join(ARCHITECTURES)}"
    )
