"""Drafters in SpecForge's layout: the DSpark fields nested in `dflash_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint._drafter import build_drafter
from trtllm_dspark.checkpoint._hf_config import Fields
from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.checkpoint.types import DrafterCheckpoint
from trtllm_dspark.errors import CheckpointError

ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")
NESTED = ("dspark_config", "dflash_config")

_SHARED = (
    "block_size",
    "confidence_head_with_markov",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "target_layer_ids",
)
# Fields that must have the one value this package computes with, where they are present.
_FIXED: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dspark",),
    "attention_mode": ("gqa", "mha"),
    "shift_label": (True,),
    "causal": (False,),
    "use_swa": (False,),
    "pure_draft_prefix_len": (0,),
}
# Without sliding windows the window's size means nothing; the loss weight matters in training only.
_NEUTRAL = ("swa_window_size", "confidence_head_alpha")

_RENAMED = {
    "logit_head.": "",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "confidence_proj.": "confidence_head.proj.",
}


def is_specforge(values: Mapping[str, Any]) -> bool:
    """Tell whether a drafter's configuration is SpecForge's."""
    return any(name in values for name in NESTED)


def load_specforge(
    directory: Path, values: Mapping[str, Any], target: ModelConfig, with_weights: bool = True
) -> DrafterCheckpoint:
    """Read a SpecForge DSpark drafter; layer ids and the block convention are DeepSpec's.

    Raises:
        CheckpointError: the drafter is not DSpark, is not supported, or does not fit the target.
    """
    path = directory / "config.json"
    names = Fields(path, values).names("architectures")
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: SpecForge drafter architecture {', '.join(names) or 'none'} is not supported, "
            f"expected {ARCHITECTURES[0]}"
        )
    Fields(path, values).refuse_unless("model_type", ("qwen3",), "this backbone is")
    flat = {name: value for name, value in values.items() if name not in NESTED}
    for nested_name in NESTED:
        nested = values.get(nested_name) or {}
        if not isinstance(nested, dict):
            raise CheckpointError(f"{path}: {nested_name} is {nested!r}, expected an object")
        _merge(path, flat, nested_name, nested)
    for name, allowed in _FIXED.items():
        Fields(path, flat).refuse_unless(name, allowed, "this form of drafter is")
    alpha = flat.get("confidence_head_alpha")
    flat.setdefault("markov_rank", 0)
    flat.setdefault("markov_head_type", "vanilla")
    flat.setdefault("enable_confidence_head", isinstance(alpha, (int, float)) and alpha > 0)
    for name in (*_FIXED, *_NEUTRAL):
        flat.pop(name, None)
    return build_drafter(directory, Fields(path, flat), target, "specforge", _rename, with_weights=with_weights)


def _merge(path: Path, flat: dict[str, Any], nested_name: str, nested: Mapping[str, Any]) -> None:
    """Lift the nested fields to the top level; the same field with two values is refused."""
    for name, value in nested.items():
        known = name in _SHARED or name in _FIXED or name in _NEUTRAL or name == "use_confidence_head"
        if not known and value not in (None, [], {}):
            raise CheckpointError(
                f"{path}: field {nested_name}.{name} = {value!r} is not known and may change what the drafter "
                "computes; remove it if it does not, otherwise this drafter is not supported"
            )
        top = "enable_confidence_head" if name == "use_confidence_head" else name
        if value is None:
            continue
        if flat.get(top, value) not in (value, None):
            raise CheckpointError(
                f"{path}: {top} is {flat[top]!r} and {nested_name}.{name} is {value!r}; make them equal"
            )
        flat[top] = value


def _rename(name: str) -> str:
    for old, new in _RENAMED.items():
        if name.startswith(old):
            name = new + name[len(old) :]
    return name
