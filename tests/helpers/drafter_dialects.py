"""The tiny drafter of `tiny_models` in the layouts of speculators and SpecForge."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.tiny_models import drafter_config, drafter_tensors

HEAD_FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
DRAFT_IDS = np.array([2, 5, 190, 7, *range(30, 90)], np.int64)


def specforge_config(nested: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """Return a SpecForge configuration; `nested` changes `dflash_config`, `overrides` the top level."""
    flat = drafter_config()
    lifted = {name: flat.pop(name) for name in (*HEAD_FIELDS, "mask_token_id", "target_layer_ids")}
    del flat["num_anchors"]
    return {
        **flat,
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "target_hidden_size": None,
        "dflash_config": {
            "attention_mode": "gqa",
            "projector_type": "dspark",
            "confidence_head_alpha": 1.0,
            **lifted,
            **(nested or {}),
        },
        **overrides,
    }


def speculators_config(nested: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """Return a speculators configuration; `nested` changes `transformer_layer_config`, `overrides` the top level."""
    flat = drafter_config()
    outer = {name: flat.pop(name) for name in (*HEAD_FIELDS, "mask_token_id", "block_size")}
    layers = flat.pop("target_layer_ids")
    for name in ("num_target_layers", "num_anchors", "architectures"):
        del flat[name]
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.6.0",
        "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "some/target"}},
        "transformer_layer_config": {**flat, **(nested or {})},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "draft_vocab_size": flat["vocab_size"],
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        **outer,
        **overrides,
    }


def reduced_tensors(**changes: Any) -> dict[str, Any]:
    """Return tensors of a speculators drafter that proposes DRAFT_IDS; `changes` replaces tensors, None drops one."""
    tensors = drafter_tensors(drafter_config(), 4, own_embed=True, own_lm_head=True, draft_vocab_size=len(DRAFT_IDS))
    known = np.zeros(192, np.bool_)
    known[DRAFT_IDS] = True
    tensors |= {"d2t": DRAFT_IDS - np.arange(len(DRAFT_IDS)), "t2d": known}
    return {name: values for name, values in {**tensors, **changes}.items() if values is not None}
