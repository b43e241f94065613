"""What a directory of traffic records is made of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine_dir import Manifest
from trtllm_dspark.errors import EngineMismatch, UsageError

SCHEMA = "trtllm_dspark.traffic"
SCHEMA_VERSION = 1
INFO_NAME = "traffic.json"
KEY_NAME = "hash_key"
PROMPT_MODES = ("hash", "drop")


@dataclass(frozen=True, slots=True)
class TrafficInfo:
    """Content of `traffic.json`; two engines with equal ones may fill one directory."""

    target_checkpoint: tuple[str, ...]
    target_weight_dtype: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    top_k: int
    prompts: str

    @property
    def feature_size(self) -> int:
        """Width of a row of features."""
        return len(self.target_layer_ids) * self.hidden_size

    @staticmethod
    def of_engine(manifest: Manifest, *, top_k: int, prompts: str) -> TrafficInfo:
        """Return what records of an engine say.

        Raises:
            UsageError: the engine has no drafter, so its target gives no features.
        """
        if manifest.drafter_config is None:
            raise UsageError("--collect_dir needs an engine with a drafter: without one the target gives no features")
        return TrafficInfo(
            target_checkpoint=tuple(sorted(entry.sha256 for entry in manifest.target.checkpoint_files)),
            target_weight_dtype=manifest.target.weight_dtype,
            target_layer_ids=manifest.drafter_config.target_layer_ids,
            hidden_size=manifest.drafter_config.target_hidden_size,
            vocab_size=manifest.target_config.vocab_size,
            top_k=min(top_k, manifest.target_config.vocab_size),
            prompts=prompts,
        )

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2) + "\n"


def read_info(directory: Path) -> TrafficInfo:
    """Read `traffic.json`.

    Raises:
        UsageError: the directory holds no traffic records, or those of another version.
    """
    path = directory / INFO_NAME
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if raw.pop("schema") != SCHEMA or raw.pop("schema_version") != SCHEMA_VERSION:
            raise UsageError(f"{path} is of another version; use the trtllm-dspark that wrote it")
        raw["target_checkpoint"] = tuple(raw["target_checkpoint"])
        raw["target_layer_ids"] = tuple(raw["target_layer_ids"])
        return TrafficInfo(**raw)
    except FileNotFoundError:
        raise UsageError(f"{directory} holds no traffic records; give the --collect_dir of a server") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); the directory is damaged") from error


def check_same(directory: Path, found: TrafficInfo, wanted: TrafficInfo) -> None:
    """Refuse to mix records that cannot be trained on together.

    Raises:
        EngineMismatch: naming the first field that differs.
    """
    for name, value in asdict(wanted).items():
        if asdict(found)[name] != value:
            raise EngineMismatch(
                f"{directory} holds records whose {name} differs from this server's; choose another --collect_dir"
            )


@dataclass(slots=True)
class TrafficRecord:
    """One answered request (docs/file_formats.md, Traffic records).

    Attributes:
        token_ids: [n] int32, the output.
        start_position: position of its first token.
        features: [n - 1, m d] float32, or uint16 bit patterns of bfloat16.
        top_ids: [n - 1, K] int32.
        top_probs: [n - 1, K] float16.
        rounds: [L, 3] int32, index of the anchor, drafts verified, drafts accepted.
        meta: the line of the `.jsonl` file.
    """

    token_ids: NDArray[np.int32]
    start_position: int
    features: NDArray[Any]
    top_ids: NDArray[np.int32]
    top_probs: NDArray[np.float16]
    rounds: NDArray[np.int32]
    meta: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes on disk, about."""
        return sum(array.nbytes for array in (self.token_ids, self.features, self.top_ids, self.top_probs, self.rounds))


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return bit patterns rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))
