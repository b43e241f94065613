"""What a pass costs: measured times by the shapes that really execute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.engine.base import Engine, FloatArray, TokenBatch
from trtllm_dspark.errors import ConfigError

MEASURE_DEPTH = 128
REPEATS = 5


@dataclass(frozen=True)
class CostTable:
    """Times of verify and draft passes.

    Attributes:
        verify_us: (num_requests, num_tokens) -> microseconds of a target pass over them.
        draft_us: num_requests -> microseconds of one drafter block.
    """

    verify_us: Mapping[tuple[int, int], float]
    draft_us: Mapping[int, float]

    def step_time_us(self, num_requests: int, max_tokens: int) -> FloatArray:
        """Return [max_tokens + 1] float32 microseconds of a pass over B tokens; entry 0 is unused.

        Between measured shapes the nearest measured number of requests not below `num_requests` counts (else the
        largest), interpolated over tokens and made monotone.

        Raises:
            ConfigError: the table is empty.
        """
        counts = sorted({requests for requests, _ in self.verify_us})
        if not counts:
            raise ConfigError("the cost table has no verify times; measure the engine again")
        row = next((count for count in counts if count >= num_requests), counts[-1])
        points = sorted((tokens, us) for (requests, tokens), us in self.verify_us.items() if requests == row)
        known = np.array(points, np.float64)
        tokens = np.arange(max_tokens + 1)
        times = np.interp(tokens, known[:, 0], known[:, 1])
        if len(known) > 1:
            # Beyond the last measured point a pass goes on growing at the last slope.
            slope = max(0.0, (known[-1, 1] - known[-2, 1]) / (known[-1, 0] - known[-2, 0]))
            times = np.where(tokens > known[-1, 0], known[-1, 1] + slope * (tokens - known[-1, 0]), times)
        return np.maximum.accumulate(times).astype(np.float32)

    def draft_time_us(self, num_requests: int) -> float:
        """Return microseconds of one drafter block over `num_requests` requests."""
        counts = sorted(self.draft_us)
        if not counts:
            return 0.0
        return self.draft_us[next((count for count in counts if count >= num_requests), counts[-1])]


def measure_cost_table(engine: Engine, *, draft_len: int) -> CostTable:
    """Time the engine's passes while it is idle: medians of a few repeats a shape.

    Slots are overwritten, so no request may be active.
    """
    limits = engine.limits
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256) if count < limits.max_batch_size]
    counts.append(limits.max_batch_size)
    depth = max(0, min(MEASURE_DEPTH, limits.max_seq_len - draft_len - 1))
    verify: dict[tuple[int, int], float] = {}
    draft: dict[int, float] = {}
    for count in counts:
        lengths = sorted({1, 2, 4, draft_len + 1} & set(range(1, draft_len + 2)))
        for length in lengths:
            if count * length <= limits.max_num_tokens:
                verify[count, count * length] = _time_verify(engine, count, length, depth)
        draft[count] = _time_draft(engine, count, depth)
    return CostTable(verify, draft)


def _time_verify(engine: Engine, count: int, length: int, depth: int) -> float:
    total = count * length
    batch = TokenBatch(
        token_ids=np.zeros(total, np.int64),
        row_lens=np.full(count, length, np.int64),
        write_indices=np.full(count, depth, np.int64),
        logit_rows=np.arange(total, dtype=np.int64),
    )
    return _median_us(lambda: engine.verify(batch))


def _time_draft(engine: Engine, count: int, depth: int) -> float:
    anchors, positions = np.zeros(count, np.int64), np.full(count, depth, np.int64)
    return _median_us(lambda: engine.draft_block(anchors, positions))


def _median_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)
