"""Side tables: JSON files of an engine directory that may change after the build (docs/file_formats.md).

They stand outside the manifest's file list and carry the hash of the engine they belong to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trtllm_dspark.engine_dir._codec import Fields
from trtllm_dspark.engine_dir.directory import EngineDirectory
from trtllm_dspark.engine_dir.manifest import MANIFEST_NAME
from trtllm_dspark.engine_dir.versions import check_schema
from trtllm_dspark.errors import DeviceError, EngineError, EngineMismatch


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file; a reader sees the old content or the new one, never a part.

    Raises:
        DeviceError: the directory cannot be written or the disk is full.
    """
    with _opened(path) as folder:
        _replace(folder, path.name, content)


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
        EngineMismatch: another engine has taken the directory's place since it was opened.
    """
    path = directory.path / name
    head = {"schema": schema, "schema_version": version, "engine_hash": directory.manifest.engine_hash}
    with _opened(path) as folder:
        # Through the one descriptor: a build that publishes between the check and the write does not get the table.
        if _engine_hash(folder) != directory.manifest.engine_hash:
            raise EngineMismatch(
                f"{path} was not written: another engine was built at {directory.path} meanwhile; run the command again"
            )
        _replace(folder, name, {**head, **content})
    return path


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open the directory of `path`; what the system refuses while it is open becomes a sentence about `path`."""
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            yield folder
        finally:
            os.close(folder)
    except OSError as error:
        raise DeviceError(f"{path} cannot be written ({error.strerror}); check the directory and its disk") from error


def _replace(folder: int, name: str, content: Mapping[str, Any]) -> None:
    temporary = f".{name}.{os.getpid()}"
    try:
        written = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666, dir_fd=folder)
        with open(written, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _engine_hash(folder: int) -> object:
    """Return the hash in the manifest that lies in an open directory now, None where there is none."""
    try:
        with open(os.open(MANIFEST_NAME, os.O_RDONLY, dir_fd=folder), encoding="utf-8") as file:
            manifest = json.load(file)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return manifest.get("engine_hash") if isinstance(manifest, dict) else None


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
