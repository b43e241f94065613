"""The real draft, schedule, verify, accept loop of the core over a pair of tables instead of networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trtllm_dspark import _core

Accept = Callable[..., tuple[np.ndarray, np.ndarray]]
"""(logits [T, V], verify_len, positions, sampling, draft) -> tokens [R, gamma + 1], emitted_len [R]."""


@dataclass(frozen=True)
class Tables:
    """A target that reads the last two tokens and a drafter that reads the anchor.

    Attributes:
        target: [V, V, V] logits by (token before last, last token).
        base: [V, gamma, V] base logits by anchor.
        hidden: [V, gamma, d] by anchor.
        heads: sequential and confidence head.
    """

    target: np.ndarray
    base: np.ndarray
    hidden: np.ndarray
    heads: _core.DraftHeads

    @property
    def vocab(self) -> int:
        return self.target.shape[0]

    @property
    def gamma(self) -> int:
        return self.base.shape[1]


def random_tables(seed: int, vocab: int = 5, gamma: int = 3, kind: str = "vanilla") -> Tables:
    rng = np.random.default_rng(seed)
    rank, size = 2, 3

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.normal(size=shape) * scale).astype(np.float32)

    target = random(vocab, vocab, vocab)
    # The drafter knows the average target, so that acceptance is neither certain nor hopeless.
    base = np.repeat(target.mean(axis=0)[:, None], gamma, axis=1) + random(vocab, gamma, vocab, scale=0.6)
    markov = {} if kind == "none" else {name: random(vocab, rank, scale=0.7) for name in ("w1", "w2")}
    heads = _core.DraftHeads(
        vocab_size=vocab, draft_vocab_size=vocab, kind=kind, **markov,
        confidence_with_markov=bool(markov), confidence_weight=random(size + (rank if markov else 0), scale=1.5),
        confidence_bias=np.array([0.8], np.float32),
    )  # fmt: skip
    return Tables(target, base.astype(np.float32), random(vocab, gamma, size), heads)


@dataclass
class Scheduler:
    """Verify lengths of groups of requests, each group a batch of its own.

    `stale_topk` takes its budget from the confidences of two rounds ago and verifies everything until there are some.
    """

    mode: str
    group: int
    draft_len: int = 2
    threshold: float = 0.35
    step_time_us: np.ndarray | None = None
    delay: int = 2
    history: list[np.ndarray] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)

    def __call__(self, confidence: np.ndarray) -> np.ndarray:
        self.history.append(confidence)
        starts = range(0, len(confidence), self.group)
        lengths = np.concatenate([self._group(slice(start, start + self.group)) for start in starts])
        self.verified.append(int(lengths.sum()))
        return lengths

    def _group(self, rows: slice) -> np.ndarray:
        confidence = np.ascontiguousarray(self.history[-1][rows])
        options: dict[str, object] = {
            "fixed": {"draft_len": self.draft_len},
            "threshold": {"threshold": self.threshold},
            "early_stop": {"step_time_us": self.step_time_us},
            "stale_topk": {},
        }[self.mode]
        if self.mode == "stale_topk":
            options["budget"] = confidence.size
            if len(self.history) > self.delay:
                stale = np.ascontiguousarray(self.history[-1 - self.delay][rows])
                options["budget"] = _core.verify_budget(stale, step_time_us=self.step_time_us)[0]
        chosen = _core.schedule_prefixes(
            self.mode, num_requests=len(confidence), max_draft_len=confidence.shape[1], confidence=confidence, **options
        )
        assert chosen.warnings == ()
        return chosen.verify_len


def accept_with_core(acceptance: str) -> Accept:
    def accept(
        logits: np.ndarray, lengths: np.ndarray, positions: np.ndarray, sampling: _core.Sampling, draft: _core.Draft
    ) -> tuple[np.ndarray, np.ndarray]:
        result = _core.accept_ragged(logits, lengths, positions, sampling, draft=draft, acceptance=acceptance)
        assert not result.status.any()
        return result.tokens, result.emitted_len

    return accept


def decode(
    tables: Tables,
    sampling: _core.Sampling,
    schedule: Callable[[np.ndarray], np.ndarray],
    accept: Accept,
    num_tokens: int,
    *,
    acceptance: str = "rejection",
    first: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Return [R, num_tokens] tokens of R requests, decoded by as many rounds as the slowest one needs.

    Args:
        tables: the pair.
        sampling: parameters of the R requests.
        schedule: confidences [R, gamma] -> verify lengths [R].
        accept: what turns logits and drafts into tokens.
        num_tokens: tokens of each request.
        acceptance: what the drafter is told.
        first: token before the anchor and anchor of each request, [R] each; None = 0 and 1 for all.
    """
    size = sampling.num_requests
    before, anchors = (row.copy() for row in first or (np.zeros(size, np.int64), np.ones(size, np.int64)))
    positions = np.full(size, 10, np.int64)
    result, counts = np.zeros((size, num_tokens), np.int64), np.zeros(size, np.int64)
    rows, steps = np.arange(size), np.arange(tables.gamma + 1)
    while counts.min() < num_tokens:
        hidden = tables.hidden[anchors]
        draft = _core.draft_chain(
            tables.heads, tables.base[anchors], anchors, positions, sampling, hidden=hidden, acceptance=acceptance
        )
        lengths = schedule(_core.confidence(tables.heads, hidden, anchors, draft.tokens))
        packed = _core.pack_tokens(anchors, draft.tokens, lengths, positions)
        previous = np.concatenate([[0], packed.token_ids[:-1]])
        previous[packed.cu_tokens[:-1]] = before
        tokens, emitted_len = accept(tables.target[previous, packed.token_ids], lengths, positions, sampling, draft)

        places = counts[:, None] + steps
        wanted = (steps < emitted_len[:, None]) & (places < num_tokens)
        result[np.nonzero(wanted)[0], places[wanted]] = tokens[wanted]
        window = np.concatenate([anchors[:, None], tokens], axis=1)
        before, anchors = window[rows, emitted_len - 1], window[rows, emitted_len]
        counts, positions = counts + emitted_len, positions + emitted_len
    return result


def sequence_law(tables: Tables, temperature: float, num_tokens: int) -> np.ndarray:
    """Return the exact law [V] * num_tokens of what the target emits after tokens 0, 1."""
    e = np.exp(tables.target.astype(np.float64) / np.float64(np.float32(temperature)))
    step = e / e.sum(-1, keepdims=True)
    law = step[0, 1]
    states = np.array([[1, v] for v in range(tables.vocab)])
    for _ in range(num_tokens - 1):
        law = law[..., None] * step[states[:, 0], states[:, 1]].reshape(*law.shape, tables.vocab)
        states = np.array([[b, v] for _, b in states for v in range(tables.vocab)])
    return law
