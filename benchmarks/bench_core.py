"""Time the core's operations on one core against a plain read of the same bytes in the same run.

    python benchmarks/bench_core.py [--vocab 49152,151936] [--requests 1,8,64,256] [--repeats 9] [--json]

`x floor` is the operation's time over its floor, both medians of interleaved repeats in thread CPU time, so that other
work on the machine disturbs little. The floor of acceptance and sampling is reading the target rows at the memory
bandwidth of a plain read (numpy's maximum of 192 MB); that of a step of the chain, a plain read of an array as large as
W2 (cached where W2 would be). Acceptance and sampling read every row; `GB/s` counts those bytes once.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark import _core

MEMORY_BYTES = 192 << 20
VERIFY_LEN = 3
GAMMA = 7
RANK = {49152: 64, 151936: 256}


@dataclass(frozen=True)
class Row:
    """One line of the table; ns and bytes are of one call (of one step for the chain)."""

    op: str
    requests: int
    vocab: int
    ns: float
    bytes: int
    gb_per_s: float
    x_floor: float
    gmac_per_s: float


def timed(call: Callable[[], object], loops: int) -> float:
    """Return CPU seconds of one call, averaged over `loops`."""
    start = time.thread_time_ns()
    for _ in range(loops):
        call()
    return (time.thread_time_ns() - start) / 1e9 / loops


def compare(op: Callable[[], object], floor: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the medians of `op` and `floor` in seconds, measured alternately after one warm-up of each."""
    loops = [max(1, int(3e-4 / max(timed(call, 1), timed(call, 1), 1e-7))) for call in (op, floor)]
    pairs = [(timed(op, loops[0]), timed(floor, loops[1])) for _ in range(repeats)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def reading(num_bytes: int) -> Callable[[], object]:
    """Return a plain read of `num_bytes` that no operation touches."""
    data = np.ones(max(1, num_bytes // 4), np.float32)
    return data.max


def against_memory(
    op: Callable[[], object], memory: Callable[[], object], num_bytes: int, repeats: int
) -> tuple[float, float]:
    """Return the medians of `op` and of reading `num_bytes` at the memory bandwidth of a large plain read."""
    took, whole = compare(op, memory, repeats)
    return took, whole * num_bytes / MEMORY_BYTES


def row(op: str, requests: int, vocab: int, num_bytes: int, seconds: tuple[float, float], macs: int = 0) -> Row:
    """Put one measurement into the table's units."""
    took, floor = seconds
    return Row(op, requests, vocab, took * 1e9, num_bytes, num_bytes / took / 1e9, took / floor, macs / took / 1e9)


def sampling(requests: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> _core.Sampling:
    """Return the same parameters for every request, with different seeds."""
    return _core.Sampling(
        np.full(requests, temperature, np.float32),
        np.arange(requests, dtype=np.uint64),
        np.full(requests, top_k),
        np.full(requests, top_p, np.float32),
    )


def logits(rng: np.random.Generator, rows: int, vocab: int) -> NDArray[np.float32]:
    """Return [rows, vocab] logits; few distinct rows, so that making them stays short."""
    few = rng.standard_normal((min(rows, 16), vocab), dtype=np.float32) * np.float32(3)
    return np.ascontiguousarray(np.resize(few, (rows, vocab)))


def accept_rows(requests: int, vocab: int, memory: Callable[[], object], repeats: int) -> Iterator[Row]:
    """Time acceptance: greedy and rejection with every draft accepted, rejection with every first draft rejected."""
    rng = np.random.default_rng(1)
    rows = requests * (1 + VERIFY_LEN)
    target = logits(rng, rows, vocab)
    verify_len, positions = np.full(requests, VERIFY_LEN), np.arange(requests) * 1000
    best = target.argmax(axis=1).reshape(requests, -1)[:, :VERIFY_LEN].copy()

    def greedy() -> object:
        return _core.accept_ragged(
            target, verify_len, positions, sampling(requests, 0), draft_tokens=best, acceptance="greedy"
        )

    yield row("accept greedy", requests, vocab, target.nbytes, against_memory(greedy, memory, target.nbytes, repeats))
    heads = _core.DraftHeads(vocab_size=vocab, draft_vocab_size=vocab, kind="none")
    params = sampling(requests, 1.0)
    same = np.ascontiguousarray(target.reshape(requests, 1 + VERIFY_LEN, vocab)[:, :VERIFY_LEN])
    draft = _core.draft_chain(heads, same, np.zeros(requests, np.int64), positions, params)

    def accepting() -> _core.Accepted:
        return _core.accept_ragged(target, verify_len, positions, params, draft=draft)

    if int(accepting().accepted_len.sum()) != requests * VERIFY_LEN:
        raise SystemExit("the benchmark's drafts were meant to be accepted, but the core rejected some")
    yield row(
        "accept rejection", requests, vocab, target.nbytes, against_memory(accepting, memory, target.nbytes, repeats)
    )
    wrong = target.argmin(axis=1).reshape(requests, -1)[:, :1].copy()
    first = np.ascontiguousarray(target.reshape(requests, 1 + VERIFY_LEN, vocab)[:, :2].reshape(-1, vocab))
    ones = np.ones(requests, np.int64)

    def rejecting() -> object:
        return _core.accept_ragged(first, ones, positions, params, draft_tokens=wrong)

    half = first.nbytes // 2
    yield row("accept, residual", requests, vocab, half, against_memory(rejecting, memory, half, repeats))


def plain_rows(vocab: int, memory: Callable[[], object], repeats: int) -> Iterator[Row]:
    """Time plain sampling of one token a row with each filter."""
    rows = 16
    target = logits(np.random.default_rng(2), rows, vocab)
    nothing, positions = np.zeros(rows, np.int64), np.arange(rows)
    for name, top_k, top_p, acceptance in [
        ("sample", 0, 1.0, "rejection"),
        ("sample top-k 50", 50, 1.0, "rejection"),
        ("sample top-p 0.9", 0, 0.9, "rejection"),
        ("sample coupled", 0, 1.0, "coupled"),
    ]:
        params = sampling(rows, 1.0, top_k, top_p)

        def sample(params: _core.Sampling = params, acceptance: str = acceptance) -> object:
            return _core.accept_ragged(target, nothing, positions, params, acceptance=acceptance)  # type: ignore[arg-type]

        yield row(name, rows, vocab, target.nbytes, against_memory(sample, memory, target.nbytes, repeats))


def chain_rows(requests: int, vocab: int, repeats: int) -> Iterator[Row]:
    """Time one step of the draft chain, int8 and float32 factors, greedy and sampled, dense and candidate walk."""
    rng = np.random.default_rng(3)
    rank, steps = RANK.get(vocab, 64), GAMMA if requests <= 8 else 2
    base = logits(rng, requests * steps, vocab).reshape(requests, steps, vocab)
    anchors, positions = np.arange(requests) % vocab, np.arange(requests) * 1000
    small = rng.integers(-127, 128, (vocab, rank), np.int8)
    scale = np.full(vocab, 0.002, np.float32)
    for dtype in ("int8", "float32"):
        factors: dict[str, Any]
        if dtype == "int8":
            factors = {"w1": small, "w2": small, "w1_scale": scale, "w2_scale": scale}
        else:
            wide = small.astype(np.float32) * np.float32(0.02)
            factors = {"w1": wide, "w2": wide}
        heads = _core.DraftHeads(vocab_size=vocab, draft_vocab_size=vocab, **factors)
        num_bytes = factors["w2"].nbytes
        macs = requests * vocab * rank
        for name, temperature, candidates in [("greedy", 0.0, 0), ("sampled", 1.0, 0), ("candidates 64", 1.0, 64)]:
            if requests > 8 and name == "sampled":
                continue  # the stored q alone would be most of a gigabyte
            params = sampling(requests, temperature)

            def chain(params: _core.Sampling = params, candidates: int = candidates) -> object:
                return _core.draft_chain(heads, base, anchors, positions, params, num_candidates=candidates)  # noqa: B023

            took, floor = compare(chain, reading(num_bytes), repeats)
            per_step = (took / steps, floor)
            yield row(f"chain {dtype} {name}", requests, vocab, num_bytes, per_step, 0 if candidates else macs)


def schedule_rows(requests: int, repeats: int) -> Iterator[Row]:
    """Time every schedule of requests x 7 candidates."""
    rng = np.random.default_rng(4)
    confidence = rng.random((requests, GAMMA), np.float32)
    table = (1000 + 0.01 * np.arange(requests * (GAMMA + 1) + 1)).astype(np.float32)
    floor = reading(confidence.nbytes)
    for mode in ("threshold", "early_stop", "stale_topk"):

        def schedule(mode: str = mode) -> object:
            return _core.schedule_prefixes(
                mode,  # type: ignore[arg-type]
                num_requests=requests,
                max_draft_len=GAMMA,
                confidence=confidence,
                threshold=0.3,
                step_time_us=table,
                budget=requests * 3,
            )

        yield row(f"schedule {mode}", requests, 0, confidence.nbytes, compare(schedule, floor, repeats))


def print_row(line: Row) -> None:
    """Print one aligned line."""
    gmac = f"{line.gmac_per_s:8.1f}" if line.gmac_per_s else "        "
    print(
        f"{line.op:28} R={line.requests:<4d} V={line.vocab:<7d} {line.ns / 1e3:11.1f} us {line.bytes:12d} B "
        f"{line.gb_per_s:7.2f} GB/s  x floor {line.x_floor:6.2f} {gmac}",
        flush=True,
    )


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield every measurement."""
    requests = [int(r) for r in args.requests.split(",")]
    memory = reading(MEMORY_BYTES)
    for count in requests:
        yield from schedule_rows(count, args.repeats)
    for vocab in (int(v) for v in args.vocab.split(",")):
        yield from plain_rows(vocab, memory, args.repeats)
        for count in requests:
            yield from accept_rows(count, vocab, memory, args.repeats)
            yield from chain_rows(count, vocab, args.repeats)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", default="49152,151936", help="vocabulary sizes")
    parser.add_argument("--requests", default="1,8,64,256", help="numbers of requests")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved repeats of each measurement")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args = parser.parse_args()
    if not args.json:
        print(f"{platform.machine()}, instruction set {_core.simd_level()}, one core")
    for line in measure(args):
        if args.json:
            print(json.dumps(asdict(line)), flush=True)
        else:
            print_row(line)


if __name__ == "__main__":
    main()
