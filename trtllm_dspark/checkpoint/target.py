"""Read a target model of any supported format."""

from __future__ import annotations

from pathlib import Path

from trtllm_dspark.checkpoint._tokenizer_check import check_tokenizer
from trtllm_dspark.checkpoint.gguf_target import load_gguf
from trtllm_dspark.checkpoint.huggingface import load_huggingface
from trtllm_dspark.checkpoint.paths import find_models, resolve_path
from trtllm_dspark.checkpoint.types import Checkpoint
from trtllm_dspark.errors import CheckpointError


def load_target(path: str | Path) -> Checkpoint:
    """Read a target model: a `.gguf` file, a Hugging Face directory, or `package:NAME` for either in a package.

    Only headers are read; weights come when `Checkpoint.arrays` is asked for them.

    Raises:
        CheckpointError: nothing is there, or the model is not one this package runs.
    """
    resolved = resolve_path(path)
    if resolved.is_dir():
        if not (resolved / "config.json").is_file():
            models = find_models(resolved)
            hint = f"pass {models[0]}" if models else "pass a Hugging Face directory or a .gguf file"
            raise CheckpointError(f"{resolved} has no config.json; {hint}")
        return _checked(resolved, load_huggingface(resolved))
    if resolved.suffix == ".safetensors":
        raise CheckpointError(f"{resolved} is a weight file; pass its directory, which holds config.json as well")
    return _checked(resolved, load_gguf(resolved))


def _checked(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    check_tokenizer(path, checkpoint)
    return checkpoint
