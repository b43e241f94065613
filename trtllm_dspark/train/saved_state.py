"""The state of a training run in one file that is replaced whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.safetensors_io import read_file, write_file
from trtllm_dspark.errors import CheckpointError, DeviceError

STATE_FILE = "training_state.safetensors"
_FACTS = "facts"


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a run continues from.

    Attributes:
        facts: plain JSON values: steps done, the configuration, moving averages.
        tensors: name -> float32 array.
    """

    facts: dict[str, Any]
    tensors: dict[str, NDArray[Any]]


def save_state(directory: Path, facts: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
    """Replace the state; a crash or a full disk at any moment leaves the state before intact.

    Raises:
        DeviceError: the disk is full or fails.
    """
    path, part = directory / STATE_FILE, directory / f"{STATE_FILE}.part"
    text = np.frombuffer(json.dumps(dict(facts)).encode(), np.int8)
    try:
        write_file(part, {**tensors, _FACTS: text})
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(part, path)
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        part.unlink(missing_ok=True)
        kept = "the one before is intact" if path.exists() else "there is none before it"
        raise DeviceError(
            f"the training state cannot be written to {directory} ({error.strerror}), {kept}; free space and go on "
            "with --resume"
        ) from error


def load_state(directory: Path) -> SavedState:
    """Read the state of a run.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no {STATE_FILE}; start without --resume")
    stored = read_file(path)
    if _FACTS not in stored:
        raise CheckpointError(f"{path} is no training state; start again in another --output_dir")
    try:
        facts = json.loads(stored[_FACTS].read().tobytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); start again in another --output_dir") from error
    return SavedState(facts, {name: entry.read() for name, entry in stored.items() if name != _FACTS})
