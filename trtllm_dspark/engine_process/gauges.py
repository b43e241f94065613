"""Gauges of what the loop holds now, under this project's names and under those of old dashboards."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.streams import Stream

_PERIOD_S = 0.1


class Gauges:
    """Set the gauges at most every 0.1 s; nobody scrapes faster.

    Args:
        metrics: where they live.
        num_slots: requests that run at once; may change.
    """

    def __init__(self, metrics: EngineMetrics, num_slots: int) -> None:
        self._metrics = metrics
        self.num_slots = num_slots
        self._last: tuple[float, int, int] = (0.0, -1, -1)

    def update(self, *, waiting: int, running: Sequence[Stream], rounds: int) -> None:
        """Set everything from the queue's length and the running requests."""
        now = time.monotonic()
        if now - self._last[0] < _PERIOD_S and self._last[1:] == (waiting, len(running)):
            return
        self._last = (now, waiting, len(running))
        used, free = len(running), self.num_slots - len(running)
        metrics = self._metrics
        metrics.set("dspark_requests_waiting", waiting)
        metrics.set("dspark_requests_running", used)
        metrics.set("dspark_slots", used, state="used")
        metrics.set("dspark_slots", free, state="free")
        metrics.set("dspark_kv_tokens", sum(_tokens(stream) for stream in running), state="used")
        prefilling = [stream for stream in running if stream.first_token_at is None]
        self._label("nv_trt_llm_request_metrics", "request_type", active=waiting + used, max=self.num_slots,
                    scheduled=used, waiting=waiting, context=len(prefilling))  # fmt: skip
        # The cache is one contiguous slot a request: a slot is what those dashboards call a block.
        self._label("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", max=self.num_slots, used=used,
                    free=free, fraction=used / self.num_slots)  # fmt: skip
        self._label(
            "nv_trt_llm_inflight_batcher_metrics",
            "inflight_batcher_specific_metric",
            total_context_tokens=sum(_tokens(stream) for stream in prefilling),
            generation_requests=used - len(prefilling),
            micro_batch_id=0,
            paused_requests=0,
        )
        self._label("nv_trt_llm_general_metrics", "general_type", timestamp=time.time(), iteration_counter=rounds)

    def _label(self, name: str, label: str, **values: float) -> None:
        for value, number in values.items():
            self._metrics.set(name, number, **{label: value})


def _tokens(stream: Stream) -> int:
    return stream.num_output_tokens + (len(stream.request.prompt_token_ids) if stream.request is not None else 0)
