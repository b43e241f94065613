"""Sessions of TensorRT engines' tests: what is asked, how it is run, what rounds take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from helpers.fake_engine import token_ids
from helpers.tiny_tensorrt import Written
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.speculation.cost_table import CostTable, DraftShape, VerifyShape

Outputs = dict[str, list[int]]


def requests(
    pair: Written, count: int, *, longest: int = 40, min_tokens: bool = True, sampled: bool = True
) -> list[Request]:
    """Greedy and sampled requests with prompts of one chunk or more, some with `min_tokens`."""
    rng = np.random.default_rng(1)
    made = []
    for index in range(count):
        prompt = rng.integers(0, pair.limits.vocab_size, rng.integers(1, longest)).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(4, 20)),
            temperature=0.0 if index % 2 or not sampled else 1.0,
            top_k=7 if index % 3 == 2 else 0,
            seed=index,
            min_tokens=index % 4 if min_tokens else 0,
            max_draft_len=2 if index == 3 else None,
        )
        made.append(Request(f"r{index}", prompt, params))
    return made


def run(
    session: Session, todo: list[Request], *, each_round: Callable[[Session, int], Any] = lambda session, number: None
) -> Outputs:
    """Add a request every other round until none is left; return each request's tokens."""
    outputs: dict[str, list[Any]] = {}
    queue = list(todo)
    for number in range(2000):
        if number % 2 == 0 and queue:
            session.add(queue.pop(0))
        if not queue and not session.has_unfinished():
            return {name: token_ids(entries) for name, entries in outputs.items()}
        for output in session.step():
            outputs.setdefault(output.request_id, []).append(output)
        each_round(session, number)
    raise AssertionError("the session never became idle")


def make(engine: Any, pair: Written, speculation: str, *, acceptance: Any = "coupled", **options: Any) -> Session:
    """Return a session in which token 5 ends a text."""
    return Session(engine, None, speculation=speculation, acceptance=acceptance, eos_token_ids=(5,), **options)


def take(engine: Any, draft_us: float) -> None:
    """Let rounds take what `table` says."""
    original = engine.collect_round

    def collect(ticket: int) -> Any:
        result = original(ticket)
        tokens = 0 if result.verify_len is None else len(result.verify_len) + int(result.verify_len.sum())
        drafting = 0.0 if result.confidence is None else draft_us
        return replace(result, device_us=100.0 + 20.0 * tokens + drafting)

    engine.collect_round = collect


def table(gamma: int, draft_us: float) -> CostTable:
    """Passes that cost 100 us and 20 more a token."""
    shapes = {
        VerifyShape(rows, rows * length, length, 128): 100.0 + 20.0 * rows * length
        for rows in (1, 2, 4)
        for length in range(1, gamma + 2)
    }
    return CostTable(shapes, {DraftShape(rows, 128): draft_us for rows in (1, 2, 4)})
