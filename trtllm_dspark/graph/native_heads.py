"""The drafter's heads as standard operators, for engines without plugins: a greedy chain and the confidence head.

The chain takes the argmax of every step, in float32. A sampled chain cannot be exact here: its law is made of integer
masses and its noise of Philox streams, which standard operators do not compute. Greedy drafts are point masses, and
acceptance of point masses keeps the target's law in every mode; who wants sampled drafts runs the core's chain over
base_logits and hidden, which stay outputs of the graph.
Source: DSpark paper, section 3.1, equations 4-7.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.graph._quantize import FloatArray
from trtllm_dspark.graph.markov_table import markov_table
from trtllm_dspark.graph.network import FLOAT_DTYPES, Network


@dataclass(slots=True)
class NativeHeads:
    """Heads over one block.

    Attributes:
        heads: weights of `heads.head_arrays`.
        hidden: [R, n, d] value in the graph's type.
        base_logits: [R, n, Vd] float32 value.
        anchors: [R] int64 value.
        draft_len: n.
    """

    net: Network
    config: DrafterConfig
    heads: dict[str, FloatArray]
    hidden: str
    base_logits: str
    anchors: str
    draft_len: int

    def append(self, draft_token_ids: NDArray[np.int64] | None) -> None:
        """Append draft_tokens [R, n] int64 target ids and, with a confidence head, confidence [R, n] float32.

        The confidence head declares inv_temperature [n] and position_bias [n], float32.
        """
        net = self.net
        columns = self._chain(draft_token_ids)
        tokens = columns[0] if len(columns) == 1 else net.node("Concat", *columns, axis=1)
        net.output(tokens, "draft_tokens", np.int64, ["R", self.draft_len])
        if self.config.confidence:
            first = net.node("Unsqueeze", self.anchors, net.ints(1))
            before = [first, *columns[:-1]]
            self._confidence(first if len(before) == 1 else net.node("Concat", *before, axis=1))

    def _chain(self, draft_token_ids: NDArray[np.int64] | None) -> list[str]:
        """Append the steps and return the tokens of each, [R, 1] target ids."""
        net, single = self.net, FLOAT_DTYPES["float32"]
        step_of = _Latent(net, self.config, self.heads)
        d2t = None if draft_token_ids is None else net.weight("target_of_draft", draft_token_ids.astype(np.int64))
        w2 = None
        if self.config.markov_head != "none":
            w2 = net.weight("markov.w2", self.heads["markov.w2"].astype(net.dtype))
        columns, previous = [], self.anchors
        for step in range(self.draft_len):
            logits = net.node("Gather", self.base_logits, net.scalar(step, np.int64), axis=1)
            if w2 is not None:
                hidden = net.node("Gather", self.hidden, net.scalar(step, np.int64), axis=1)
                bias = net.node("Gemm", step_of(previous, hidden), w2, transB=1)
                logits = net.node("Add", logits, net.cast(bias, net.dtype, single))
            # Ties go to the lowest id, as in the core.
            previous = net.node("ArgMax", logits, axis=1, keepdims=0, select_last_index=0)
            if d2t is not None:
                previous = net.node("Gather", d2t, previous, axis=0)
            columns.append(net.node("Unsqueeze", previous, net.ints(1)))
        return columns

    def _confidence(self, before: str) -> None:
        """Append sigmoid((w . [h_k ; W1[x before k]] + b) / T_k + bias_k); W1's half is a table of its products."""
        net, size, single = self.net, self.config.backbone.hidden_size, FLOAT_DTYPES["float32"]
        weight = self.heads["confidence.weight"]
        column = net.weight("confidence.weight", np.ascontiguousarray(weight[:size, None]))
        logit = net.node("MatMul", net.cast(self.hidden, net.dtype, single), column)
        logit = net.node("Squeeze", logit, net.ints(2))
        if self.config.confidence_with_markov:
            table = net.weight("confidence.table", markov_table(self.heads["markov.w1"], weight[size:]))
            logit = net.node("Add", logit, net.node("Gather", table, before, axis=0))
        if "confidence.bias" in self.heads:
            logit = net.node("Add", logit, net.constant(self.heads["confidence.bias"]))
        scale = net.input("inv_temperature", np.float32, [self.draft_len])
        shift = net.input("position_bias", np.float32, [self.draft_len])
        value = net.node("Sigmoid", net.node("Add", net.node("Mul", logit, scale), shift))
        net.output(value, "confidence", np.float32, ["R", self.draft_len])


class _Latent:
    """What W2 multiplies in a step, [R, r] in the graph's type; the rnn head carries its state along."""

    def __init__(self, net: Network, config: DrafterConfig, heads: dict[str, FloatArray]) -> None:
        self._net, self._kind, self._rank = net, config.markov_head, config.markov_rank
        self._state: str | None = None
        if self._kind != "none":
            self._w1 = net.weight("markov.w1", heads["markov.w1"].astype(net.dtype))
        if self._kind in ("gated", "rnn"):
            name = "markov.gate" if self._kind == "gated" else "markov.rnn"
            parts = [f"{name}.{part}" for part in ("weight", "bias") if f"{name}.{part}" in heads]
            self._joint = [net.weight(part, heads[part].astype(net.dtype)) for part in parts]

    def __call__(self, previous: str, hidden: str) -> str:
        """Append one step from the token ids before it [R] and its hidden rows [R, d]."""
        net = self._net
        embedded = net.node("Gather", self._w1, previous, axis=0)
        if self._kind == "vanilla":
            return embedded
        if self._kind == "gated":
            gate = self._gemm(net.node("Concat", hidden, embedded, axis=1))
            return net.node("Mul", net.node("Sigmoid", gate), embedded)
        state = self._state or self._zeros(previous)
        joint = self._gemm(net.node("Concat", state, embedded, hidden, axis=1))
        sizes = net.ints(*[self._rank] * 3)
        gate, candidate, output = net.split("Split", [joint, sizes], 3, axis=1)
        gate = net.node("Sigmoid", gate)
        # gate * state + (1 - gate) * tanh(candidate)
        candidate = net.node("Tanh", candidate)
        self._state = net.node("Add", candidate, net.node("Mul", gate, net.node("Sub", state, candidate)))
        return net.node("Tanh", output)

    def _gemm(self, x: str) -> str:
        return self._net.node("Gemm", x, *self._joint, transB=1)

    def _zeros(self, previous: str) -> str:
        net = self._net
        shape = net.node("Concat", net.node("Shape", previous), net.ints(self._rank), axis=0)
        return net.node("Expand", net.constant(np.zeros((1, 1), net.dtype)), shape)
