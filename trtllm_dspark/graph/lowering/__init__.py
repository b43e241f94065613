"""Attention lowerings: what a canonical layer's attention becomes on each target."""

from __future__ import annotations

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph.lowering.base import ContextCache, Lowering, SelfAttention
from trtllm_dspark.graph.lowering.ort import CACHE_MULTIPLE, OrtLowering

__all__ = ["CACHE_MULTIPLE", "LOWERINGS", "ContextCache", "Lowering", "OrtLowering", "SelfAttention", "get_lowering"]

LOWERINGS: dict[str, Lowering] = {"ort": OrtLowering()}


def get_lowering(name: str) -> Lowering:
    """Return the lowering called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in LOWERINGS:
        raise ConfigError(f"there is no attention lowering {name!r}; use one of {', '.join(LOWERINGS)}")
    return LOWERINGS[name]
