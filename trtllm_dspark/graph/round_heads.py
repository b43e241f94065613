"""The heads of a draft graph as plugin nodes: the sequential chain, then confidence, schedule and packing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import onnx
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.checkpoint.int8_rows import quantise_rows
from trtllm_dspark.graph._quantize import FloatArray
from trtllm_dspark.graph.drafter import BlockBody
from trtllm_dspark.graph.markov_table import markov_table
from trtllm_dspark.graph.network import Dim, Network
from trtllm_dspark.graph.plugin_nodes import plugin, plugin_specs
from trtllm_dspark.graph.round_options import Acceptance, RoundOptions, Schedule

PREFIX = "drafter."
"""Begins the names of the drafter's weights and caches in both graphs."""
_HEAD_KINDS = ("none", "vanilla", "gated", "rnn")
_SAMPLING = (("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("seed", np.int64))
_OWN_HEADS = {"gated": "gate", "rnn": "rnn"}
_OUTPUT_DTYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32}


def sampling_inputs(net: Network) -> dict[str, str]:
    """Declare the sampling parameters and the anchors' positions of R requests."""
    inputs = {name: net.input(name, dtype, ["R"]) for name, dtype in _SAMPLING}
    return inputs | {"positions": net.input("positions", np.int32, ["R"])}


def draft_of_target(vocab: int, draft_token_ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return [V] draft id of each target id, -1 where there is none."""
    table = np.full(vocab, -1, np.int32)
    table[draft_token_ids] = np.arange(draft_token_ids.size, dtype=np.int32)
    return table


@dataclass(slots=True)
class DraftHeads:
    """The heads over one block; every plugin output becomes a graph output of the same name."""

    net: Network
    config: DrafterConfig
    options: RoundOptions
    heads: dict[str, FloatArray]
    body: BlockBody
    vocab: int
    gamma: int
    _hidden: str | None = None

    def append_chain(self, draft_token_ids: NDArray[np.int64] | None) -> None:
        """Append DsparkMarkovDraft: temperature, top_k, top_p, seed, positions, anchors [R] -> the drafts."""
        net, kind = self.net, self.config.markov_head
        inputs = sampling_inputs(net) | {"anchors": net.input("anchors", np.int32, ["R"])}
        inputs["base_logits"] = self._blocks(self.body.base_logits, self.body.draft_vocab_size)
        if kind != "none":
            inputs |= self._factors()
        if kind in _OWN_HEADS:
            inputs["hidden"] = self.hidden
            for part in ("weight", "bias"):
                name = f"markov.{_OWN_HEADS[kind]}.{part}"
                if name in self.heads:
                    inputs[f"{_OWN_HEADS[kind]}_{part}"] = net.weight(PREFIX + name, self.heads[name])
        if draft_token_ids is not None:
            inputs["target_of_draft"] = net.weight("target_of_draft", draft_token_ids.astype(np.int32))
            inputs["draft_of_target"] = net.weight("draft_of_target", draft_of_target(self.vocab, draft_token_ids))
        fields = {
            "vocab": self.vocab,
            "head_kind": _HEAD_KINDS.index(kind),
            "acceptance": get_args(Acceptance).index(self.options.acceptance),
            "num_candidates": self.options.num_candidates,
            "mapped_vocab": int(draft_token_ids is not None),
            "int8_weights": int(kind != "none" and self.options.int8_heads),
            "head_bias": int("gate_bias" in inputs or "rnn_bias" in inputs),
        }
        self._append("DsparkMarkovDraft", inputs, fields)

    def append_schedule(self, max_num_tokens: int) -> None:
        """Append DsparkConfidenceSchedule.

        Of caps, live and thresholds [R], limits, terms, costs and calibration it makes the rows of the verify pass.
        """
        net, config = self.net, self.config
        inputs = {name: name for name in ("anchors", "positions", "draft_tokens")}
        # A block whose draft failed has no tokens to verify, whatever the schedule would admit.
        drafted = net.node("Equal", "draft_status", net.scalar(0, np.int32))
        usable = net.node("Cast", drafted, to=onnx.TensorProto.INT32)
        inputs["caps"] = net.node("Mul", net.input("caps", np.int32, ["R"]), usable)
        if self.options.schedule == "threshold":
            inputs["thresholds"] = net.input("thresholds", np.float32, ["R"])
        elif self.options.schedule != "fixed":
            inputs["live"] = net.input("live", np.int32, ["R"])
        inputs["limits"] = net.input("limits", np.int32, [4])
        inputs["terms"] = net.input("terms", np.float32, [3])
        inputs["step_time_us"] = net.input("step_time_us", np.float32, [max_num_tokens + 1])
        markov_half = config.confidence and config.confidence_with_markov
        if config.confidence:
            weight = self.heads["confidence.weight"][: config.backbone.hidden_size]
            bias = self.heads.get("confidence.bias", np.zeros(1, np.float32))
            inputs["hidden"] = self.hidden
            inputs["hidden_weight"] = net.weight(f"{PREFIX}confidence.weight", np.ascontiguousarray(weight))
            inputs["confidence_bias"] = net.weight(f"{PREFIX}confidence.bias", bias)
            inputs["inv_temperature"] = net.input("inv_temperature", np.float32, [self.gamma])
            inputs["position_bias"] = net.input("position_bias", np.float32, [self.gamma])
        if markov_half:
            table = markov_table(self._embeddings(), self.heads["confidence.weight"][config.backbone.hidden_size :])
            inputs["markov_table"] = net.weight(f"{PREFIX}confidence.table", table)
        fields = {
            "schedule_mode": get_args(Schedule).index(self.options.schedule),
            "confidence_head": int(config.confidence),
            "markov_half": int(markov_half),
        }
        self._append("DsparkConfidenceSchedule", inputs, fields)

    @property
    def hidden(self) -> str:
        """[R, n, d] hidden rows of the block."""
        if self._hidden is None:
            self._hidden = self._blocks(self.body.hidden, self.config.backbone.hidden_size)
        return self._hidden

    def _blocks(self, value: str, width: int) -> str:
        return self.net.node("Reshape", value, self.net.ints(-1, self.gamma, width))

    def _embeddings(self) -> FloatArray:
        if not self.options.int8_heads:
            return self.heads["markov.w1"]
        codes, scales = quantise_rows(self.heads["markov.w1"])
        return codes * scales[:, None]

    def _factors(self) -> dict[str, str]:
        """Store W1 and W2 in the graph's type, or in int8 with one scale a row."""
        net, inputs = self.net, {}
        for short in ("w1", "w2"):
            name, factor = f"{PREFIX}markov.{short}", self.heads[f"markov.{short}"]
            if self.options.int8_heads:
                codes, scales = quantise_rows(factor)
                inputs[short] = net.weight(f"{name}/codes", codes)
                inputs[f"{short}_scale"] = net.weight(f"{name}/scales", scales)
            else:
                inputs[short] = net.weight(name, factor.astype(net.dtype))
        return inputs

    def _append(self, name: str, inputs: dict[str, str], fields: dict[str, int]) -> None:
        tensors = plugin_specs()[name].outputs(fields)
        plugin(self.net, name, inputs, fields, outputs={tensor.name: tensor.name for tensor in tensors})
        for tensor in tensors:
            shape = [self._dim(dim) for dim in tensor.dims]
            self.net.output(tensor.name, tensor.name, _OUTPUT_DTYPES[tensor.dtypes[0]], shape)

    def _dim(self, symbol: str) -> Dim:
        known = {"gamma": self.gamma, "Vd": self.body.draft_vocab_size, "num_candidates": self.options.num_candidates}
        if symbol.isdigit():
            return int(symbol)
        if symbol == "(R)*(gamma+1)":
            return f"R*{self.gamma + 1}"
        return known.get(symbol, symbol)
