"""Open an engine directory: every file must be there, as it was built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.engine_dir.manifest import MANIFEST_NAME, Manifest, file_sha256
from trtllm_dspark.errors import EngineError


@dataclass(frozen=True, slots=True)
class EngineDirectory:
    """A checked engine directory."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Return the path of a file of the manifest.

        Raises:
            EngineError: the manifest does not list it.
        """
        if all(entry.name != name for entry in self.manifest.files):
            raise EngineError(f"engine directory {self.path} has no {name}; build the engine again")
        return self.path / name

    def optional_file(self, name: str) -> Path | None:
        """Return the path of a file of the manifest, or None where the engine has no such part."""
        return self.path / name if any(entry.name == name for entry in self.manifest.files) else None


def open_engine_dir(path: str | Path, *, verify_hashes: bool = True) -> EngineDirectory:
    """Read the manifest of an engine directory and check its files against it.

    Args:
        path: the `--output_dir` of a build.
        verify_hashes: also hash every file; False checks existence and size only.

    Raises:
        EngineError: no engine directory, another schema version, or a file is missing or differs.
    """
    root = Path(path)
    if not root.is_dir():
        raise EngineError(
            f"engine directory {root} does not exist; make it with: trtllm-dspark build --output_dir {root}"
        )
    try:
        text = (root / MANIFEST_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise EngineError(
            f"{root} is no engine directory (it has no {MANIFEST_NAME}); give the --output_dir of a finished build"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{root / MANIFEST_NAME} cannot be read ({error}); build the engine again") from error
    manifest = Manifest.from_json(text, where=str(root / MANIFEST_NAME))
    for entry in manifest.files:
        _check_file(root, entry.name, entry.size, entry.sha256 if verify_hashes else None)
    return EngineDirectory(root, manifest)


def _check_file(root: Path, name: str, size: int, sha256: str | None) -> None:
    # A manifest may come from anywhere: a name must not lead out of the directory.
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise EngineError(f"{root / MANIFEST_NAME} lists '{name}', which lies outside the engine; build it again")
    path = root / name
    if not path.is_file():
        raise EngineError(f"engine file {path} is missing; copy the whole engine directory or build it again")
    try:
        found = path.stat().st_size
        if found != size:
            raise EngineError(f"engine file {path} has {found} bytes, expected {size}; copy it again or build again")
        if sha256 is not None and file_sha256(path) != sha256:
            raise EngineError(f"engine file {path} is damaged (its SHA-256 differs); copy it again or build again")
    except OSError as error:
        raise EngineError(f"engine file {path} cannot be read ({error}); copy it again or build again") from error
