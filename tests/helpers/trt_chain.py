"""What a TensorRT engine must satisfy against the CPU engine of the same weights, on a GPU or on a recording device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers.fake_engine import collect_outputs, token_ids
from trtllm_dspark.engine.base import ContextBatch, TokenBatch
from trtllm_dspark.runtime import Request, SamplingParams, Session


def check_passes(engine: Any, cpu: Any, tokens: np.ndarray, *, tolerance: float) -> None:
    """Two ragged rows in two passes each: logits, features, the drafter's context and block.

    The second passes read what the first ones cached, so caches are updated where later passes look.

    Args:
        engine: TensorRT's.
        cpu: the same weights in float32.
        tokens: [2, n] ids.
        tolerance: largest error as a part of the largest magnitude.
    """
    half = tokens.shape[1] // 2
    for start, rows in ((0, (half, half - 2)), (1, (3, 2))):
        starts = np.zeros(2, np.int64) if start == 0 else np.array([half, half - 2])
        ids = np.concatenate([tokens[row, s : s + n] for row, (s, n) in enumerate(zip(starts, rows, strict=True))])
        wanted = np.array([rows[0] - 1, len(ids) - 1])
        batch = TokenBatch(ids, np.array(rows), starts, wanted)
        got, expected = engine.verify(batch), cpu.verify(batch)
        _close(got.logits, expected.logits, tolerance, f"logits of pass {start}")
        _close(got.features, expected.features, tolerance, f"features of pass {start}")
        for each, output in ((engine, got), (cpu, expected)):
            each.absorb(ContextBatch(output.features, np.array(rows), starts))
    anchors, positions = tokens[:, -1], np.array([half + 3, half])
    got, expected = (each.draft_block(anchors, positions) for each in (engine, cpu))
    _close(got.base_logits, expected.base_logits, tolerance, "base logits")
    _close(got.hidden, expected.hidden, tolerance, "hidden states")


def check_tokens(
    engine: Any, cpu: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int, tolerance: float, least_equal: float
) -> Session:
    """Greedy speculation with two rounds in flight emits plain decoding's tokens, near ties aside.

    Kernels of other shapes round otherwise, so two tokens whose logits lie within the tolerance may change places; from
    there on a request's text may differ and is not compared.

    Returns:
        The speculating session.
    """
    requests = [
        Request(str(index), prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))
        for index, prompt in enumerate(prompts)
    ]
    plain = _outputs(Session(cpu, None, speculation="off"), requests)
    session = Session(engine, None, speculation="fixed")
    speculative = _outputs(session, requests)
    equal = total = 0
    for request in requests:
        one, other = plain[request.request_id], speculative[request.request_id]
        assert len(one) == len(other) == max_tokens
        total += max_tokens
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), max_tokens)
        equal += same
        if same < max_tokens:
            prefix = np.array([*request.prompt_token_ids, *one[:same]], np.int64)
            row = _last_logits(cpu, prefix)
            gap = abs(float(row[one[same]] - row[other[same]]))
            assert gap <= tolerance * float(np.abs(row).max()), (
                f"request {request.request_id} differs at {same}: {gap=}"
            )
    assert equal >= least_equal * total, f"{equal} of {total} tokens before the first near tie"
    return session


def check_graphs(engine: Any, session: Session) -> None:
    """Decoding rounds were graph launches, and each key was captured once."""
    stats = engine.graph_stats
    assert stats is not None
    assert stats.eager_rounds == 0
    assert 0 < stats.misses < stats.replays
    assert session.stats.acceptance.accepted > 0


def _outputs(session: Session, requests: Sequence[Request]) -> dict[str, list[int]]:
    for request in requests:
        session.add(request)
    outputs = collect_outputs(session)
    assert session.failure is None
    return {name: token_ids(entries) for name, entries in outputs.items()}


def _last_logits(cpu: Any, tokens: np.ndarray) -> np.ndarray:
    step = cpu.limits.max_num_tokens
    for start in range(0, len(tokens), step):
        piece = tokens[start : start + step]
        batch = TokenBatch(piece, np.array([len(piece)]), np.array([start]), np.array([len(piece) - 1]))
        row: np.ndarray = cpu.verify(batch).logits[0]
    return row


def _close(got: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    assert np.isfinite(got).all(), f"{what}: not finite"
    error, largest = np.abs(got - expected).max(), np.abs(expected).max()
    assert error <= tolerance * largest, f"{what}: {error=} {largest=}"
