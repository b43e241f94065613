"""Side tables: JSON files of an engine directory that may change after the build (docs/file_formats.md).

They stand outside the manifest's file list and carry the hash of the engine they belong to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.engine_dir._codec import Fields
from trtllm_dspark.engine_dir.directory import EngineDirectory
from trtllm_dspark.engine_dir.versions import check_schema
from trtllm_dspark.errors import DeviceError, EngineError, EngineMismatch


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file; a reader sees the old content or the new one, never a part.

    Raises:
        DeviceError: the directory cannot be written or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DeviceError(f"{path} cannot be written ({error.strerror}); check the directory and its disk") from error


def write_side_table(
    directory: EngineDirectory, name: str, *, schema: str, version: int, content: Mapping[str, Any]
) -> Path:
    """Write a side table of an engine and return its path.

    Args:
        directory: the engine.
        name: file name.
        schema: name of the format.
        version: its version.
        content: members beside `schema`, `schema_version` and `engine_hash`.

    Raises:
        DeviceError: the directory cannot be written or the disk is full.
    """
    path = directory.path / name
    head = {"schema": schema, "schema_version": version, "engine_hash": directory.manifest.engine_hash}
    write_json(path, {**head, **content})
    return path


def read_side_table(directory: EngineDirectory, name: str, *, schema: str, version: int, remedy: str) -> Fields | None:
    """Read a side table, or return None where the engine has none.

    Args:
        directory: the engine.
        name: file name.
        schema: name of the format.
        version: the version this reader knows.
        remedy: what a user does about a bad file, for messages.

    Raises:
        EngineError: the file cannot be read or is of another format or version.
        EngineMismatch: it was made for another engine.
    """
    path = directory.path / name
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path} cannot be read ({error}); {remedy}") from error
    check_schema(raw, schema, version, str(path), remedy)
    if raw.get("engine_hash") != directory.manifest.engine_hash:
        raise EngineMismatch(f"{path} belongs to another engine (its engine_hash differs); {remedy}")
    return Fields(raw, str(path))
