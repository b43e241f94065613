"""The plugin library of a build or an engine: the right file, the right contract, known to TensorRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_dspark.errors import EngineError
from trtllm_dspark.plugins.contract import contract_hash, expected_contract, parse_contract, plugin_contract

_REMEDY = "make the library of this version with: trtllm-dspark build_plugins --output_dir DIR"


def check_plugin_library(path: Path, flag: str) -> str:
    """Check that a library promises what the graphs rely on.

    Args:
        path: the shared library.
        flag: that named it, for messages.

    Returns:
        The contract's SHA-256, for the manifest.

    Raises:
        EngineError: no such file, no library of ours, or one of another contract; says where they differ.
    """
    if not path.is_file():
        raise EngineError(f"{flag} {path} does not exist; {_REMEDY}")
    found, expected = plugin_contract(path.resolve()), expected_contract()
    if found != expected:
        raise EngineError(f"{flag} {path} {_difference(found, expected)}; {_REMEDY}")
    return contract_hash(found)


def _difference(found: str, expected: str) -> str:
    """Say in what the contracts differ: a plugin's absence, its version, or its first differing line."""
    try:
        theirs = parse_contract(found)
    except EngineError as error:
        return f"tells a contract that cannot be read ({error})"
    for name, spec in parse_contract(expected).items():
        if name not in theirs:
            return f"has no plugin {name}"
        if theirs[name].version != spec.version:
            return f"has {name} version {theirs[name].version}, graphs need version {spec.version}"
    for line in expected.splitlines():
        if line not in found.splitlines():
            return f"was built from other sources (it lacks the line {line.strip()!r})"
    return "was built from other sources (it promises more than the graphs know)"


def register_plugins(trt: Any, path: Path, flag: str) -> None:
    """Load the library into TensorRT's registry, once a process, and check that every plugin can be created.

    Raises:
        EngineError: TensorRT refuses the library or lacks one of its plugins afterwards.
    """
    registry = trt.get_plugin_registry()
    specs = parse_contract(expected_contract()).values()
    missing = [spec for spec in specs if registry.get_creator(spec.name, spec.version, spec.namespace) is None]
    if not missing:
        return
    if registry.load_library(str(path.resolve())) is None:
        raise EngineError(f"TensorRT cannot load {flag} {path}; {_REMEDY}")
    for spec in missing:
        if registry.get_creator(spec.name, spec.version, spec.namespace) is None:
            raise EngineError(f"TensorRT finds no {spec.name} version {spec.version} in {path}; {_REMEDY}")
