"""The one check of `schema` and `schema_version` that every JSON file of an engine goes through."""

from __future__ import annotations

from typing import Any

from trtllm_dspark.errors import EngineError


def check_schema(raw: Any, schema: str, version: int, where: str, remedy: str) -> None:
    """Refuse JSON that is not an object of this schema and version; `true` is no version.

    Args:
        raw: the parsed file.
        schema: name of the format.
        version: the version this reader knows.
        where: the file, for messages.
        remedy: what a user does about it.

    Raises:
        EngineError: it is something else.
    """
    if not isinstance(raw, dict) or raw.get("schema") != schema:
        raise EngineError(f"{where} is not a {schema} file; {remedy}")
    found = raw.get("schema_version")
    if type(found) is not int or found != version:
        raise EngineError(f"{where} has schema version {found!r}, this version reads {version}; {remedy}")
