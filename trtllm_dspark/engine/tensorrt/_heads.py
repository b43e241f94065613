"""The drafter's sequential and confidence heads on the device, as the kernels read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.engine.tensorrt._memory import Layout, upload
from trtllm_dspark.engine.tensorrt.device import Device
from trtllm_dspark.graph.markov_table import markov_table
from trtllm_dspark.plugins import ELEMENT_TYPES

_KINDS = {"none": 0, "vanilla": 1, "gated": 2, "rnn": 3}


class DeviceHeads:
    """Weights of the heads in one allocation.

    Args:
        device: where they go.
        config: the drafter as built.
        tensors: of `heads.safetensors`.
        vocab_size: V.
        stream: carries the copies.

    Attributes:
        draft: head parameters of `markov_draft`, pointers and scalars.
        confidence: head parameters of `confidence_schedule`; null pointers without a confidence head.
        draft_of_target: address of [V] int32, or None.
        has_confidence: whether there is a confidence head.
    """

    def __init__(
        self,
        device: Device,
        config: DrafterConfig,
        tensors: Mapping[str, NDArray[Any]],
        vocab_size: int,
        stream: int,
    ) -> None:
        arrays = _arrays(config, tensors, vocab_size)
        layout = Layout({name: (value.shape, value.dtype) for name, value in arrays.items()})
        base = device.allocate(layout.num_bytes)
        address = layout.addresses(base)
        for name, value in arrays.items():
            upload(device, address[name], value, stream)
        self.has_confidence = "hidden_weight" in arrays
        self.draft_of_target = address.get("draft_of_target")
        reads_hidden = config.markov_head in ("gated", "rnn")
        self.draft: dict[str, int | None] = {
            "vocab": vocab_size,
            "draft_vocab": config.draft_vocab_size,
            "rank": config.markov_rank if config.markov_head != "none" else 0,
            "hidden_size": config.backbone.hidden_size if reads_hidden else 0,
            "head_kind": _KINDS[config.markov_head],
            "num_candidates": 0,
            "logits_type": ELEMENT_TYPES["float32"],
            "weight_type": ELEMENT_TYPES["int8" if "w1_scale" in arrays else "float32"],
            "hidden_type": ELEMENT_TYPES["float32"],
        }
        names = ("w1", "w2", "w1_scale", "w2_scale", "gate_weight", "gate_bias", "rnn_weight", "rnn_bias")
        for name in (*names, "target_of_draft", "draft_of_target"):
            self.draft[name] = address.get(name)
        self.confidence = {name: address.get(name) for name in ("hidden_weight", "markov_table", "confidence_bias")}


def _arrays(config: DrafterConfig, tensors: Mapping[str, NDArray[Any]], vocab: int) -> dict[str, NDArray[Any]]:
    names = {
        "w1": "markov.w1",
        "w2": "markov.w2",
        "w1_scale": "markov.w1.scale",
        "w2_scale": "markov.w2.scale",
        "gate_weight": "markov.gate.weight",
        "gate_bias": "markov.gate.bias",
        "rnn_weight": "markov.rnn.weight",
        "rnn_bias": "markov.rnn.bias",
    }
    arrays = {name: tensors[stored] for name, stored in names.items() if stored in tensors}
    if "d2t" in tensors:
        target_of_draft = tensors["d2t"].astype(np.int32)
        arrays["target_of_draft"] = target_of_draft
        arrays["draft_of_target"] = np.full(vocab, -1, np.int32)
        arrays["draft_of_target"][target_of_draft] = np.arange(target_of_draft.size, dtype=np.int32)
    if "confidence.weight" in tensors:
        size = config.backbone.hidden_size
        weight = tensors["confidence.weight"]
        arrays["hidden_weight"] = np.ascontiguousarray(weight[:size])
        if config.confidence_with_markov:
            embeddings = arrays["w1"].astype(np.float32)
            if "w1_scale" in arrays:
                embeddings *= arrays["w1_scale"][:, None]
            arrays["markov_table"] = markov_table(embeddings, weight[size:])
        if "confidence.bias" in tensors:
            arrays["confidence_bias"] = tensors["confidence.bias"]
    return arrays
