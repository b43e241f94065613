"""Random rounds for the draft and acceptance kernels, and what the core says about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.kernels.numbers import decode, encode
from trtllm_dspark import _core

Array = NDArray[Any]


@dataclass(frozen=True)
class RoundShape:
    """What a generated round looks like."""

    num_requests: int = 3
    draft_len: int = 3
    vocab: int = 1500
    draft_vocab: int = 0  # 0 = the target's
    rank: int = 16
    hidden_size: int = 24
    head_kind: str = "vanilla"
    acceptance: str = "rejection"
    num_candidates: int = 0
    logits_type: str = "float32"
    weight_type: str = "float32"
    filters: bool = True  # some requests ask for top-k and top-p
    bad_rows: bool = False  # some base logits and target logits are NaN or all -inf
    seed: int = 0


@dataclass
class RoundCase:
    """Arrays of one round, stored as the kernels read them; `logits` and `heads` are the core's view of the same."""

    shape: RoundShape
    base_logits: Array
    hidden: Array
    weights: dict[str, Array]
    anchors: Array
    positions: Array
    temperature: Array
    top_k: Array
    top_p: Array
    seeds: Array
    target_of_draft: Array | None
    verify_len: Array
    target_logits: Array
    stride: int
    heads: _core.DraftHeads = field(repr=False)

    @property
    def cu_tokens(self) -> Array:
        return np.concatenate([[0], np.cumsum(1 + self.verify_len)]).astype(np.int32)

    @property
    def draft_of_target(self) -> Array | None:
        if self.target_of_draft is None:
            return None
        table = np.full(self.shape.vocab, -1, np.int32)
        table[self.target_of_draft] = np.arange(len(self.target_of_draft), dtype=np.int32)
        return table

    def sampling(self) -> _core.Sampling:
        return _core.Sampling(self.temperature, self.seeds, self.top_k.astype(np.int64), self.top_p)

    def core_base(self) -> Array:
        return np.ascontiguousarray(decode(self.base_logits, self.shape.logits_type))

    def core_target(self) -> Array:
        rows = int(self.cu_tokens[-1])
        return np.ascontiguousarray(decode(self.target_logits, self.shape.logits_type)[:rows, : self.shape.vocab])


def _rows(random: np.random.Generator, shape: tuple[int, ...], element_type: str) -> Array:
    # A few levels only: plenty of exact ties.
    values = np.round(random.normal(0, 3, shape) * 4) / 4
    values[random.random(shape) < 0.02] = -np.inf
    return encode(values.astype(np.float32), element_type)


def _weights(
    random: np.random.Generator, shape: RoundShape, draft_vocab: int
) -> tuple[dict[str, Array], dict[str, Any]]:
    stored: dict[str, Array] = {}
    core: dict[str, Any] = {}
    if shape.head_kind == "none":
        return stored, core
    for name, rows in (("w1", shape.vocab), ("w2", draft_vocab)):
        if shape.weight_type == "int8":
            stored[name] = random.integers(-127, 128, (rows, shape.rank)).astype(np.int8)
            stored[f"{name}_scale"] = random.uniform(0.002, 0.01, rows).astype(np.float32)
            core[name], core[f"{name}_scale"] = stored[name], stored[f"{name}_scale"]
        else:
            stored[name] = encode(random.normal(0, 0.6, (rows, shape.rank)), shape.weight_type)
            core[name] = np.ascontiguousarray(decode(stored[name], shape.weight_type))
    rows, columns = {"gated": (1, 1), "rnn": (3, 2)}.get(shape.head_kind, (0, 0))
    if rows:
        name = "gate" if shape.head_kind == "gated" else "rnn"
        width = columns * shape.rank + shape.hidden_size
        stored[f"{name}_weight"] = random.normal(0, 0.3, (rows * shape.rank, width)).astype(np.float32)
        stored[f"{name}_bias"] = random.normal(0, 0.3, rows * shape.rank).astype(np.float32)
        core |= {key: stored[key] for key in (f"{name}_weight", f"{name}_bias")}
    return stored, core


def make_round(shape: RoundShape) -> RoundCase:
    """Generate a round; equal shapes give equal rounds."""
    random = np.random.default_rng(shape.seed)
    requests, gamma = shape.num_requests, shape.draft_len
    draft_vocab = shape.draft_vocab or shape.vocab
    target_of_draft = None
    if draft_vocab != shape.vocab:
        # Not ascending: nothing may rely on the order of the table.
        target_of_draft = random.permutation(shape.vocab)[:draft_vocab].astype(np.int32)
    weights, core_weights = _weights(random, shape, draft_vocab)
    verify_len = random.integers(0, gamma + 1, requests).astype(np.int64)
    if shape.bad_rows:
        verify_len[:1] = 0  # a request whose draft failed verifies nothing
    rows = int(np.sum(1 + verify_len))
    stride = shape.vocab + int(random.integers(0, 9))
    target = _rows(random, (rows + 2, stride), shape.logits_type)
    target[rows:] = encode(np.float32(np.nan) * np.ones(1, np.float32), shape.logits_type)[0]
    target[:, shape.vocab :] = target[rows, 0]
    base = _rows(random, (requests, gamma, draft_vocab), shape.logits_type)
    if shape.bad_rows and requests > 1:
        base[0, gamma - 1, 3] = encode(np.array([np.nan], np.float32), shape.logits_type)[0]
        target[rows - 1, : shape.vocab] = encode(np.array([-np.inf], np.float32), shape.logits_type)[0]
    temperature = random.choice(np.array([0.0, 0.7, 1.0, 1.6], np.float32), requests)
    top_k = np.where(random.random(requests) < 0.5, random.integers(1, 50, requests), 0) * shape.filters
    top_p = np.where(random.random(requests) < 0.5, random.uniform(0.2, 0.99, requests), 1.0) if shape.filters else 1.0
    heads = _core.DraftHeads(
        vocab_size=shape.vocab, draft_vocab_size=draft_vocab, kind=shape.head_kind,  # type: ignore[arg-type]
        d2t=None if target_of_draft is None else target_of_draft.astype(np.int64), **core_weights,
    )  # fmt: skip
    case = RoundCase(
        shape=shape,
        base_logits=base,
        hidden=random.normal(0, 1, (requests, gamma, shape.hidden_size)).astype(np.float32),
        weights=weights,
        anchors=random.integers(0, shape.vocab, requests).astype(np.int32),
        positions=random.integers(0, 5000, requests).astype(np.int32),
        temperature=temperature.astype(np.float32),
        top_k=top_k.astype(np.int32),
        top_p=np.broadcast_to(np.float32(top_p), requests).astype(np.float32),
        seeds=random.integers(0, 2**64, requests, dtype=np.uint64),
        target_of_draft=target_of_draft,
        verify_len=verify_len,
        target_logits=target,
        stride=stride,
        heads=heads,
    )
    _favour_draft(random, case)
    return case


def _favour_draft(random: np.random.Generator, case: RoundCase) -> None:
    """Raise the target logits of most draft tokens, so that prefixes of every length are accepted."""
    tokens = core_draft(case).tokens
    for request, first in enumerate(case.cu_tokens[:-1]):
        for step in range(int(case.verify_len[request])):
            token = tokens[request, step]
            if token >= 0 and random.random() < 0.8:
                raised = np.array([14.0 if case.temperature[request] < 0.5 else 9.0], np.float32)
                case.target_logits[first + step, token] = encode(raised, case.shape.logits_type)[0]


def core_draft(case: RoundCase) -> _core.Draft:
    """The draft as the core makes it."""
    shape = case.shape
    return _core.draft_chain(
        case.heads, case.core_base(), case.anchors.astype(np.int64), case.positions.astype(np.int64), case.sampling(),
        hidden=case.hidden if shape.head_kind in ("gated", "rnn") else None,
        acceptance=shape.acceptance,  # type: ignore[arg-type]
        num_candidates=shape.num_candidates,
    )  # fmt: skip
