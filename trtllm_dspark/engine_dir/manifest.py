"""`manifest.json`: what an engine directory holds, for which limits, made from which files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine_dir._codec import Fields, drafter_config, drafter_fields, model_config
from trtllm_dspark.engine_dir.versions import check_schema
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
    """Where a model came from, how its weights are stored and, on a GPU, what it computes in."""

    weight_dtype: str
    checkpoint_files: tuple[FileEntry, ...]
    dtype: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON values; without `dtype` where the backend leaves no choice."""
        fields = asdict(self)
        if self.dtype is None:
            del fields["dtype"]
        return fields


@dataclass(frozen=True, slots=True)
class GpuBuild:
    """How the plans of a GPU engine were made.

    Attributes:
        lowering: `trt_native` or `trt_plugin`; they have other bindings.
        cache_len: positions of a slot.
        plugin_contract: hash of the contract of the plugin library they need; None without plugins.
        strip_plan: the plans hold no weights and are refitted from the graphs in `graphs/`.
        weight_streaming: weights may stay in host memory.
        acceptance, schedule, num_candidates: what the round of a plugin engine is compiled for; None without plugins.
    """

    lowering: str
    cache_len: int
    plugin_contract: str | None = None
    strip_plan: bool = False
    weight_streaming: bool = False
    acceptance: str | None = None
    schedule: str | None = None
    num_candidates: int | None = None


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
    gpu: GpuBuild | None = None

    @property
    def engine_hash(self) -> str:
        """SHA-256 over everything but the tool versions, so that equal inputs and equal files give equal hashes."""
        body = self._body()
        del body["tools"]
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _body(self) -> dict[str, Any]:
        drafter = None
        if self.drafter is not None and self.drafter_config is not None:
            drafter = {**self.drafter.as_json(), "config": drafter_fields(self.drafter_config)}
        body = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "backend": self.backend,
            "limits": asdict(self.limits),
            "target": {**self.target.as_json(), "config": asdict(self.target_config)},
            "drafter": drafter,
            "files": [asdict(entry) for entry in self.files],
            "tools": self.tools,
        }
        if self.gpu_architectures:
            body["gpu_architectures"] = self.gpu_architectures
        if self.gpu is not None:
            body["gpu"] = asdict(self.gpu)
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
        check_schema(raw, SCHEMA, SCHEMA_VERSION, where, "build the engine again with this version of trtllm-dspark")
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
        gpu_architectures=() if fields.is_null("gpu_architectures") else fields.strings("gpu_architectures"),
        gpu=None if fields.is_null("gpu") else _gpu_build(fields.child("gpu")),
        tools={name: str(value) for name, value in fields.child("tools").raw.items()},
    )


def _gpu_build(fields: Fields) -> GpuBuild:
    return GpuBuild(
        lowering=fields.one_of("lowering", ("trt_native", "trt_plugin")),
        cache_len=fields.integer("cache_len"),
        plugin_contract=fields.optional_string("plugin_contract"),
        strip_plan=fields.boolean("strip_plan"),
        weight_streaming=fields.boolean("weight_streaming"),
        acceptance=fields.optional_string("acceptance"),
        schedule=fields.optional_string("schedule"),
        num_candidates=fields.optional_integer("num_candidates"),
    )


def _model_entry(fields: Fields) -> ModelEntry:
    files = _file_entries(fields, "checkpoint_files")
    return ModelEntry(fields.string("weight_dtype"), files, fields.optional_string("dtype"))


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
