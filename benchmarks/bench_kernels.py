"""Device time of every kernel against the time its bytes need: python benchmarks/bench_kernels.py [--op NAME]

Needs a CUDA device, its driver, nvcc and numpy. Each op is first checked against the core on a small shape; then a
launch is captured into a CUDA graph and replayed, with 256 MiB written before each replay so that L2 is empty.
`bytes` are the reads and writes no implementation can avoid; `floor_us` = bytes / --bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.kernels.attention import AttentionShape, attention_problem, make_attention
from helpers.kernels.backends import CudaBackend, CudaDriver
from helpers.kernels.build import cuda_library
from helpers.kernels.checks import ATTENTIONS, ROUNDS, SCHEDULES, check_attention, check_round, check_schedule
from helpers.kernels.cuda_graph import CudaGraph
from helpers.kernels.round_cases import RoundCase, RoundShape, make_round
from helpers.kernels.rounds import Problem, accept_problem, draft_problem, launch, place
from helpers.kernels.schedule import ScheduleShape, make_schedule, schedule_problem

from trtllm_dspark.errors import DsparkError
from trtllm_dspark.plugins import find_toolchain

FLUSH_BYTES = 256 * 2**20
GAMMA = 7


@dataclass(frozen=True)
class Measurement:
    """One row of the table: what to launch, and the bytes it cannot avoid."""

    label: str
    op: str
    num_requests: int
    num_tokens: int
    bytes: int
    problem: Callable[[CudaBackend], Problem]


def _qwen_round(num_requests: int, **changes: object) -> RoundCase:
    """The sizes of Qwen3-8B and its released drafter; a narrow vocabulary is tiled, which timing does not notice."""
    vocab, narrow = 151936, 4096
    shape = RoundShape(
        num_requests=num_requests, draft_len=GAMMA, vocab=narrow, rank=256, logits_type="bfloat16", filters=False,
        **{"weight_type": "bfloat16", **changes},  # type: ignore[arg-type]
    )  # fmt: skip
    case = make_round(shape)
    case.temperature[:] = 1
    repeats = -(-vocab // narrow)

    def widen(array: np.ndarray, axis: int) -> np.ndarray:
        tiled = np.concatenate([array] * repeats, axis=axis)
        return np.ascontiguousarray(tiled.take(np.arange(vocab), axis=axis))

    case.base_logits = widen(case.base_logits, 2)
    case.weights = {name: widen(array, 0) for name, array in case.weights.items()}
    case.verify_len[:] = GAMMA
    rows = np.resize(case.target_logits[:1, :narrow], (num_requests * (GAMMA + 1), narrow))
    case.target_logits, case.stride = widen(rows, 1), vocab
    object.__setattr__(case, "shape", RoundShape(**{**shape.__dict__, "vocab": vocab}))
    return case


def _drafts() -> Iterator[Measurement]:
    vocab, rank = 151936, 256
    for weight_type, width in (("bfloat16", 2), ("int8", 1)):
        for requests in (1, 8, 32, 64):
            case = _qwen_round(requests, weight_type=weight_type)
            # W2, the base logits, and the corrected logits that are q.
            moved = GAMMA * (vocab * rank * width + requests * vocab * (2 + 4))
            yield Measurement(
                f"draft dense {weight_type}", "markov_draft", requests, requests * GAMMA, moved,
                lambda _, case=case: draft_problem(case),  # type: ignore[misc]
            )  # fmt: skip
    for requests in (1, 8, 32):
        case = _qwen_round(requests, num_candidates=64)
        moved = requests * GAMMA * (vocab * 2 + 64 * rank * 2)
        yield Measurement(
            "draft walk C=64", "markov_draft", requests, requests * GAMMA, moved,
            lambda _, case=case: draft_problem(case),  # type: ignore[misc]
        )  # fmt: skip


def _accepts() -> Iterator[Measurement]:
    for requests in (1, 8, 32, 64):
        case = _qwen_round(requests, num_candidates=64)

        def problem(backend: CudaBackend, case: RoundCase = case) -> Problem:
            return accept_problem(case, launch(backend, "markov_draft", *draft_problem(case)))

        tokens = requests * (GAMMA + 1)
        yield Measurement("accept rejection", "ragged_accept", requests, tokens, tokens * 151936 * 2, problem)


def _schedules() -> Iterator[Measurement]:
    for requests in (8, 64, 256):
        case = make_schedule(ScheduleShape(num_requests=requests, draft_len=GAMMA, hidden_size=4096, vocab=4096))
        moved = requests * GAMMA * 4096 * 4
        yield Measurement(
            "schedule early_stop", "confidence_schedule", requests, requests * (GAMMA + 1), moved,
            lambda _, case=case: schedule_problem(case),  # type: ignore[misc]
        )  # fmt: skip


def _attentions() -> Iterator[Measurement]:
    for requests, context, count in ((1, 4096, 8), (8, 4096, 8), (32, 4096, 8), (32, 4096, 1), (8, 32768, 8)):
        pages = -(-(context + count) // 64)
        shape = AttentionShape(
            contexts=(context,) * requests, tokens=(count,) * requests, num_heads=32, num_kv_heads=8, head_dim=128,
            page_size=64, pages_per_request=pages, kv_split=512, element_type="bfloat16", padding=0,
        )  # fmt: skip
        moved = 2 * requests * (context + count) * 8 * 128 * 2

        def problem(_: CudaBackend, shape: AttentionShape = shape) -> Problem:
            case = make_attention(shape)
            return attention_problem(case, case.key_cache, case.value_cache)

        yield Measurement(f"attention ctx {context}", "ragged_attention", requests, requests * count, moved, problem)


OPS = {"draft": _drafts, "accept": _accepts, "schedule": _schedules, "attention": _attentions}
CHECKS: dict[str, Callable[[CudaBackend], None]] = {
    "draft": lambda backend: check_round(backend, ROUNDS["bfloat16"]),
    "accept": lambda backend: check_round(backend, ROUNDS["walk"]),
    "schedule": lambda backend: check_schedule(backend, SCHEDULES["early_stop"]),
    "attention": lambda backend: check_attention(backend, ATTENTIONS["wide_head_bfloat16"]),
}


def measure(path: Path, measurement: Measurement, repeats: int) -> float:
    """Return the median device time of one launch in microseconds."""
    backend = CudaBackend(path)
    params, _, _ = place(backend, measurement.op, *measurement.problem(backend))
    graph = CudaGraph(backend, lambda stream: backend.library.launch(measurement.op, stream=stream, **params))
    flush = backend.empty((FLUSH_BYTES,), np.uint8)
    times = graph.times_us(repeats, lambda stream: backend.fill(flush, stream))
    backend.close()
    return statistics.median(times)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, help="only this operation")
    parser.add_argument(
        "--bandwidth", type=float, default=4.3, help="TB/s of a device copy; 4.3 was measured on an H200"
    )
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    if not CudaDriver.is_available():
        print("bench_kernels.py: no CUDA device: libcuda.so.1 is missing or finds none", file=sys.stderr)
        return 4
    try:
        path = cuda_library(find_toolchain().nvcc, CudaDriver().compute_capability())
        print(
            f"{'op':<22} {'R':>4} {'gamma':>5} {'T':>5} {'bytes':>12} {'floor_us':>9} {'median_us':>9} {'x floor':>8}"
        )
        for name in [args.op] if args.op else OPS:
            backend = CudaBackend(path)
            CHECKS[name](backend)
            backend.close()
            for row in OPS[name]():
                floor, median = row.bytes / args.bandwidth / 1e6, measure(path, row, args.repeats)
                sizes = f"{row.label:<22} {row.num_requests:>4} {GAMMA:>5} {row.num_tokens:>5} {row.bytes:>12}"
                print(f"{sizes} {floor:>9.1f} {median:>9.1f} {median / floor:>8.2f}", flush=True)
    except DsparkError as error:
        print(f"bench_kernels.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
