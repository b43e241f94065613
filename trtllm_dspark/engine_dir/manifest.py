"""`manifest.json`: what an engine directory holds, for which limits, made from which files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine_dir._codec import Fields, drafter_config, drafter_fields, model_config
from trtllm_dspark.errors import EngineError

SCHEMA = "trtllm_dspark.engine"
SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: name relative to its directory, size in bytes, SHA-256 as 64 hexadecimal digits."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Shapes an engine was built for, in requests and tokens."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Where a model came from and how its weights are stored."""

    weight_dtype: str
    checkpoint_files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of `manifest.json`; `engine_hash` identifies the engine and is what side files refer to."""

    backend: str
    limits: BuildLimits
    target: ModelEntry
    target_config: ModelConfig
    drafter: ModelEntry | None
    drafter_config: DrafterConfig | None
    files: tuple[FileEntry, ...]
    tools: dict[str, str]
    gpu_architectures: tuple[str, ...] = ()

    @property
    def engine_hash(self) -> str:
        """SHA-256 over everything but the tool versions, so that equal inputs and equal files give equal hashes."""
        body = self._body()
        del body["tools"]
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _body(self) -> dict[str, Any]:
        drafter = None
        if self.drafter is not None and self.drafter_config is not None:
            drafter = {**asdict(self.drafter), "config": drafter_fields(self.drafter_config)}
        body = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "backend": self.backend,
            "limits": asdict(self.limits),
            "target": {**asdict(self.target), "config": asdict(self.target_config)},
            "drafter": drafter,
            "files": [asdict(entry) for entry in self.files],
            "tools": self.tools,
        }
        if self.gpu_architectures:
            body["gpu_architectures"] = self.gpu_architectures
        plain: dict[str, Any] = json.loads(json.dumps(body))
        return plain

    def to_json(self) -> str:
        """Return the file's text, with the engine hash."""
        return json.dumps({**self._body(), "engine_hash": self.engine_hash}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str, *, where: str) -> Manifest:
        """Parse and check a manifest.

        Args:
            text: content of the file.
            where: its path, for messages.

        Raises:
            EngineError: not a manifest, another schema version, a field is missing or wrong, or the hash differs.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{where} is not valid JSON ({error}); build the engine again") from error
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise EngineError(
                f"{where} is not the manifest of a trtllm-dspark engine; give the --output_dir of a build"
            )
        if raw.get("schema_version") != SCHEMA_VERSION:
            raise EngineError(
                f"{where} has schema version {raw.get('schema_version')!r}, this version reads {SCHEMA_VERSION}; "
                "build the engine again with this version of trtllm-dspark"
            )
        manifest = _parse(Fields(raw, where))
        if raw.get("engine_hash") != manifest.engine_hash:
            raise EngineError(f"{where} was changed after the build (engine_hash differs); build the engine again")
        return manifest


def _parse(fields: Fields) -> Manifest:
    target = fields.child("target")
    drafter = None if fields.is_null("drafter") else fields.child("drafter")
    limits = fields.child("limits")
    return Manifest(
        backend=fields.string("backend"),
        limits=BuildLimits(
            max_batch_size=limits.integer("max_batch_size"),
            max_seq_len=limits.integer("max_seq_len"),
            max_num_tokens=limits.integer("max_num_tokens"),
            max_draft_len=limits.integer("max_draft_len"),
        ),
        target=_model_entry(target),
        target_config=model_config(target.child("config")),
        drafter=None if drafter is None else _model_entry(drafter),
        drafter_config=None if drafter is None else drafter_config(drafter.child("config")),
        files=_file_entries(fields, "files"),
        gpu_architectures=tuple(str(name) for name in fields.raw.get("gpu_architectures", ())),
        tools={name: str(value) for name, value in fields.child("tools").raw.items()},
    )


def _model_entry(fields: Fields) -> ModelEntry:
    return ModelEntry(fields.string("weight_dtype"), _file_entries(fields, "checkpoint_files"))


def _file_entries(fields: Fields, name: str) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(entry.string("name"), entry.integer("size"), entry.string("sha256"))
        for entry in fields.children(name)
    )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path, root: Path) -> FileEntry:
    """Return name relative to `root`, size and hash of a file."""
    return FileEntry(path.relative_to(root).as_posix(), path.stat().st_size, file_sha256(path))
