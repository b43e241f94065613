"""The contract between an engine and the plugin library: names, versions, fields and tensors of every plugin."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

from trtllm_dspark.errors import EngineError


def plugin_contract(path: str | Path) -> str:
    """Return the canonical contract text of a plugin library.

    Raises:
        EngineError: the file is not a plugin library of this project.
    """
    try:
        function = ctypes.CDLL(str(path)).dspark_plugin_contract
    except (OSError, AttributeError) as error:
        raise EngineError(f"{path} is not the trtllm_dspark plugin library: {error}") from error
    function.restype = ctypes.c_char_p
    return bytes(function()).decode()


def contract_hash(contract: str) -> str:
    """Return the SHA-256 of a contract text, as engine manifests hold it."""
    return hashlib.sha256(contract.encode()).hexdigest()
