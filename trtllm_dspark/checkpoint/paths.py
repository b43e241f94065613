"""Checkpoint paths as users write them: a file, a directory or `package:NAME`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from trtllm_dspark.errors import CheckpointError

PACKAGE_PREFIX = "package:"


def resolve_path(spec: str | Path) -> Path:
    """Return the file or directory that `spec` means.

    `package:NAME` is the one model inside the installed Python package NAME (a `.gguf` file, or a directory
    with `config.json`); `package:NAME/relative/path` names a file in it. The package is not imported.

    Raises:
        CheckpointError: nothing is there, or the package holds no model or more than one.
    """
    text = str(spec)
    if not text.startswith(PACKAGE_PREFIX):
        path = Path(text).expanduser()
        if not path.exists():
            raise CheckpointError(f"checkpoint {text} does not exist; pass a directory, a .gguf file or package:NAME")
        return path
    name, _, relative = text[len(PACKAGE_PREFIX) :].partition("/")
    root = _package_directory(name)
    if relative:
        path = root / relative
        if not path.exists():
            raise CheckpointError(f"package {name} is installed at {root} but has no {relative}")
        return path
    models = find_models(root)
    if len(models) != 1:
        found = ", ".join(str(model.relative_to(root)) for model in models) or "none"
        raise CheckpointError(
            f"package {name} must hold exactly one model but holds {found}; name one as package:{name}/FILE"
        )
    return models[0]


def find_models(root: Path) -> list[Path]:
    """Return the `.gguf` files below `root`, or else the directories with a `config.json`, sorted.

    Directories that cannot be listed are left out, links to directories are not followed.
    """
    gguf: list[Path] = []
    configs: list[Path] = []
    for directory, _, names in os.walk(root):
        gguf += (Path(directory, name) for name in names if name.endswith(".gguf"))
        configs += (Path(directory) for name in names if name == "config.json")
    return sorted(path for path in gguf if path.is_file()) or sorted(configs)


def _package_directory(name: str) -> Path:
    # A dotted name would import the parent package while it is looked up.
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        hint = name.replace("_", "-") if name.isidentifier() else "NAME"
        raise CheckpointError(f"no Python package named {name!r} is installed; install it (pip install {hint})")
    return Path(next(iter(found.submodule_search_locations)))
