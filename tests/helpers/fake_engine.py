"""An engine in NumPy whose every answer depends on everything the runtime must get right.

The target's next token is a hash of the whole cached prefix, so a token in a wrong slot, position or order changes
the output. The drafter knows the target's rule and is wrong on every `mistake_every`-th position; it checks that its
context is exactly the target's cache, token by token, and raises otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import (
    BlockOutput,
    ContextBatch,
    EngineLimits,
    FloatArray,
    IntArray,
    TargetOutput,
    TokenBatch,
)

VOCAB = 64
SURE, DOUBTFUL = 3.0, -1.0
"""Confidence logits of a right and a wrong draft."""


def next_token(prefix: list[int]) -> int:
    """Return the target's greedy token after a prefix."""
    value = 7
    for token in prefix:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def greedy(prompt: list[int], count: int) -> list[int]:
    """Return the target's greedy output."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class FakeEngine:
    """See the module.

    Attributes:
        mistake_every: drafts at positions divisible by it are wrong; 0 = never.
        logit: logit of the next token; every other token has 0.
        nan_prefix: prefixes beginning with this token get NaN logits.
        nan_draft: the drafter's logits of prefixes beginning with this token are NaN.
        fail_after: raise in this verify pass (counted from 1), or never.
        passes: what ran, in order.
    """

    max_batch_size: int = 4
    max_seq_len: int = 96
    max_num_tokens: int = 32
    gamma: int = 4
    mistake_every: int = 3
    logit: float = 30.0
    nan_prefix: int | None = None
    nan_draft: int | None = None
    fail_after: int | None = None
    has_drafter: bool = True
    has_confidence: bool = True
    passes: list[str] = field(default_factory=list)
    verified: list[TokenBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Memory is there before it is written; -1 is no token, so reading it changes the output.
        self.target = [[-1] * self.max_seq_len for _ in range(self.max_batch_size)]
        self.context = [[-1] * self.max_seq_len for _ in range(self.max_batch_size)]
        # A Markov head of zeros: drafts follow the base logits, confidences the first hidden value.
        zeros = np.zeros((VOCAB, 1), np.float32)
        self.heads = _core.DraftHeads(
            vocab_size=VOCAB,
            draft_vocab_size=VOCAB,
            w1=zeros,
            w2=zeros,
            confidence_weight=np.array([1.0, 0.0, 0.0], np.float32) if self.has_confidence else None,
        )

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            max_num_tokens=self.max_num_tokens,
            max_draft_len=self.gamma if self.has_drafter else 0,
            vocab_size=VOCAB,
            draft_vocab_size=VOCAB,
            feature_size=2,
            mask_token_id=0,
            has_drafter=self.has_drafter,
        )

    def verify(self, batch: TokenBatch) -> TargetOutput:
        self.passes.append("verify")
        self.verified.append(batch)
        if self.fail_after is not None and self.passes.count("verify") >= self.fail_after:
            raise RuntimeError("planted failure")
        assert len(batch.token_ids) <= self.max_num_tokens
        assert batch.row_lens.min() >= 1
        logits = np.zeros((len(batch.token_ids), VOCAB), np.float32)
        features = np.zeros((len(batch.token_ids), 2), np.float32)
        start = 0
        for row, length in enumerate(batch.row_lens.tolist()):
            cache = self.target[batch.first_slot + row]
            written = int(batch.write_indices[row])
            assert written <= len(cache), "a hole in the target's cache"
            del cache[written:]
            for index in range(start, start + length):
                cache.append(int(batch.token_ids[index]))
                features[index] = cache[-1], len(cache) - 1
                logits[index, next_token(cache)] = self.logit
                if self.nan_prefix == cache[0]:
                    logits[index] = np.nan
            assert len(cache) <= self.max_seq_len
            start += length
        return TargetOutput(logits[batch.logit_rows], features)

    def absorb(self, batch: ContextBatch) -> None:
        self.passes.append("absorb")
        start = 0
        for row, length in enumerate(batch.row_lens.tolist()):
            context = self.context[batch.first_slot + row]
            if length:
                del context[int(batch.write_indices[row]) :]
            for token, position in batch.features[start : start + length].tolist():
                assert position == len(context), "a hole in the drafter's context"
                context.append(int(token))
            start += length
        assert start == len(batch.features)

    def draft_block(self, anchors: IntArray, positions: IntArray, *, first_slot: int = 0) -> BlockOutput:
        self.passes.append("draft")
        logits = np.zeros((len(anchors), self.gamma, VOCAB), np.float32)
        hidden = np.full((len(anchors), self.gamma, 2), SURE, np.float32)
        for row, (anchor, position) in enumerate(zip(anchors.tolist(), positions.tolist(), strict=True)):
            context = self.context[first_slot + row][:position]
            # A row that rides along has no context; a drafting one must have the target's.
            assert position == 0 or context == self.target[first_slot + row][:position]
            prefix = [*context, anchor]
            for step in range(self.gamma):
                token = next_token(prefix)
                if self.mistake_every and len(prefix) % self.mistake_every == 0:
                    token = (token + 1) % VOCAB
                    hidden[row, step, 0] = DOUBTFUL
                logits[row, step, token] = self.logit
                prefix.append(token)
            if prefix[0] == self.nan_draft:
                logits[row] = np.nan
        return BlockOutput(logits, hidden)

    def copy_slot(self, source: int, destination: int, *, num_tokens: int, num_context: int) -> None:
        self.passes.append("copy")
        self.target[destination] = self.target[source][:num_tokens]
        self.context[destination] = self.context[source][:num_context]

    def close(self) -> None:
        self.passes.append("close")


def collect_outputs(session: Any, *, max_rounds: int = 2000) -> dict[str, list[Any]]:
    """Step a session until it is idle; return each request's outputs."""
    outputs: dict[str, list[Any]] = {}
    for _ in range(max_rounds):
        if not session.has_unfinished():
            return outputs
        for output in session.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the session never became idle")


def token_ids(outputs: list[Any]) -> list[int]:
    """Return all tokens of one request's outputs."""
    return [token for output in outputs for token in output.new_token_ids]


def text(outputs: list[Any]) -> str:
    """Return all text of one request's outputs."""
    return "".join(output.text_delta for output in outputs)


__all__ = ["VOCAB", "FakeEngine", "FloatArray", "collect_outputs", "greedy", "next_token", "text", "token_ids"]
