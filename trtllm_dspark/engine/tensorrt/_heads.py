"""The drafter's sequential and confidence heads on the device, as the kernels read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.engine.tensorrt._memory import Layout, upload
from trtllm_dspark.engine.tensorrt.device import Device
from trtllm_dspark.plugins import ELEMENT_TYPES

_KINDS = {"none": 0, "vanilla": 1, "gated": 2, "rnn": 3}
_LANES = 16


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
            arrays["markov_table"] = markov_table(arrays["w1"], arrays.get("w1_scale"), weight[size:])
        if "confidence.bias" in tensors:
            arrays["confidence_bias"] = tensors["confidence.bias"]
    return arrays


def markov_table(w1: NDArray[Any], scale: NDArray[Any] | None, weight: NDArray[Any]) -> NDArray[np.float32]:
    """Return the Markov half of the confidence of every previous token, with the bits the core gives it.

    Args:
        w1: [V, r] float32 or int8.
        scale: [V] float32 of an int8 `w1`.
        weight: [r] float32.

    Returns:
        [V] float32: the sum of products in the core's order, 16 lanes and a tree (docs/core_numerics.md).
    """
    lanes = np.zeros((len(w1), _LANES), np.float32)
    for column in range(w1.shape[1]):
        element = w1[:, column].astype(np.float32)
        if scale is not None:
            element = element * scale
        lanes[:, column % _LANES] = _fma32(element, np.float32(weight[column]), lanes[:, column % _LANES])
    for width in (8, 4, 2, 1):
        lanes[:, :width] = lanes[:, :width] + lanes[:, width : 2 * width]
    return np.ascontiguousarray(lanes[:, 0])


def _fma32(a: NDArray[np.float32], b: np.float32, c: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a * b + c rounded once: exact product in float64, sum rounded to odd (docs/core_numerics.md)."""
    product = a.astype(np.float64) * np.float64(b)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & even, np.nextafter(total, towards), total)
    return odd.astype(np.float32)
