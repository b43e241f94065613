"""Time of an engine's passes: decode and verify steps, packed against padded ragged rounds, draft blocks, contexts.

    python benchmarks/bench_engine.py --engine_dir E [--num_threads 2] [--context 256] [--repeats 40] [--json]

All shapes are measured in turn within one loop, so that another load on the machine disturbs them alike; `min` is the
figure to compare, `median` shows the disturbance. A round costs by the tokens it packs: `padded` is the same round with
every row as long as the longest one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import ContextBatch, Engine, TokenBatch

ROUNDS = ([1], [2], [4], [8], [1] * 4, [8] * 4, [8, 2, 2, 4], [8, 1, 1, 1], [8] * 8, [8, 8, 1, 1, 1, 1, 1, 1])
Case = Callable[[], object]


def verify_case(engine: Engine, rows: list[int], context: int) -> Case:
    """Return a verify pass of `rows` tokens a row behind `context` cached tokens, logits of every token."""
    count = sum(rows)
    ids = np.arange(count, dtype=np.int64) + 100
    starts = np.full(len(rows), context, np.int64)
    batch = TokenBatch(ids, np.array(rows, np.int64), starts, np.arange(count, dtype=np.int64))
    return lambda: engine.verify(batch)


def draft_cases(engine: Engine, num_rows: int, context: int) -> dict[str, Case]:
    """Return a backbone pass, a whole draft (backbone, chain, confidence) and an absorption of two tokens a row."""
    anchors, positions = np.arange(num_rows) + 100, np.full(num_rows, context)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2 * num_rows, engine.limits.feature_size)).astype(np.float32)
    batch = ContextBatch(features, np.full(num_rows, 2), positions)
    greedy = _core.Sampling(np.zeros(num_rows, np.float32), np.arange(num_rows, dtype=np.uint64))

    def whole() -> object:
        block = engine.draft_block(anchors, positions)
        draft = _core.draft_chain(
            engine.heads, block.base_logits, anchors, positions, greedy, hidden=block.hidden, acceptance="greedy"
        )
        return _core.confidence(engine.heads, block.hidden, anchors, draft.tokens)

    return {
        f"backbone x{num_rows}": lambda: engine.draft_block(anchors, positions),
        f"draft x{num_rows}": whole,
        f"absorb 2 x{num_rows}": lambda: engine.absorb(batch),
    }


def prepare(engine: Engine, context: int) -> None:
    """Fill every slot's cache, so that attention reads real values and caches have their length."""
    limits = engine.limits
    for slot in range(limits.max_batch_size):
        for start in range(0, context, limits.max_num_tokens):
            rows = np.array([min(limits.max_num_tokens, context - start)])
            ids = np.arange(start, start + rows[0]) % 1000 + 100
            out = engine.verify(TokenBatch(ids, rows, np.array([start]), np.zeros(1, np.int64), slot))
            if limits.has_drafter:
                engine.absorb(ContextBatch(out.features, rows, np.array([start]), slot))


def measure(cases: dict[str, Case], repeats: int) -> dict[str, tuple[float, float]]:
    """Return minimum and median milliseconds of each case, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: (min(values[1:]), statistics.median(values[1:])) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="tokens cached before each pass")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engine = load_engine(args.engine_dir, num_threads=args.num_threads)
    prepare(engine, args.context)
    rounds = [rows for rows in ROUNDS if len(rows) <= engine.limits.max_batch_size]
    cases = {f"verify {','.join(map(str, rows))}": verify_case(engine, rows, args.context) for rows in rounds}
    for rows in rounds:
        if len(set(rows)) > 1:
            cases[f"padded {','.join(map(str, rows))}"] = verify_case(engine, [max(rows)] * len(rows), args.context)
    if engine.limits.has_drafter:
        for num_rows in (1, engine.limits.max_batch_size):
            cases |= draft_cases(engine, num_rows, args.context)
    results = measure(cases, args.repeats)
    engine.close()
    if args.json:
        print(json.dumps({name: {"min_ms": low, "median_ms": mid} for name, (low, mid) in results.items()}))
        return
    print(f"{'pass':28} {'min ms':>8} {'median':>8}")
    for name, (low, mid) in results.items():
        print(f"{name:28} {low:8.2f} {mid:8.2f}")


if __name__ == "__main__":
    main()
