"""Put session, queue, socket and watchdog together and run until told to stop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_dspark.engine_process.connections import ConnectionServer
from trtllm_dspark.engine_process.lanes import Lane
from trtllm_dspark.engine_process.loop import EngineLoop
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.queue import RequestQueue
from trtllm_dspark.engine_process.requests import PromptEncoder, RequestLimits
from trtllm_dspark.engine_process.service import EngineService
from trtllm_dspark.engine_process.swap import DrafterSwap, TrialOptions
from trtllm_dspark.runtime.load_control import LoadControl
from trtllm_dspark.serving.watchdog import exit_with_parent

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How the process serves.

    Attributes:
        socket_path: Unix socket to listen on.
        max_queue_size: requests that may wait.
        parent_pid: process to die with, or None to live on its own.
        candidate_engine_dir: engine whose drafter is tried from the start, or "".
        trial: how it is tried.
    """

    socket_path: str
    max_queue_size: int
    parent_pid: int | None = None
    candidate_engine_dir: str = ""
    trial: TrialOptions = TrialOptions()


def serve_lane(
    lane: Lane,
    open_beside: Callable[[str, str], Lane],
    encoder: PromptEncoder,
    limits: RequestLimits,
    options: ProcessOptions,
    info: Mapping[str, Any],
    metrics: EngineMetrics,
    load: LoadControl | None = None,
) -> None:
    """Serve `lane` on the socket until SIGTERM; running and waiting requests finish first, and every lane is closed.

    A second SIGTERM ends the process at once.

    Args:
        lane: what serves first.
        open_beside: (serving engine directory, another one) -> a lane with the other one.
        encoder: tokenizer and chat template.
        limits: what a request may ask for.
        options: see `ProcessOptions`.
        info: facts about the engine for clients.
        metrics: where everything is counted.
        load: what limits the sessions, for the metrics.
    """
    if options.parent_pid is not None:
        exit_with_parent(options.parent_pid)
    queue = RequestQueue(max_waiting=options.max_queue_size)
    loop = EngineLoop(lane, queue=queue, metrics=metrics, token_text=encoder.token_text, load=load)
    service = EngineService(loop, encoder, limits, metrics, info)

    def describe(serving: Lane) -> None:
        metrics.set("dspark_kv_tokens", serving.num_slots * limits.max_seq_len, state="max")
        service.serves(max_batch_size=serving.num_slots, max_draft_len=serving.max_draft_len)

    describe(lane)
    loop.swap = service.swap = DrafterSwap(
        loop.lanes,
        lambda engine_dir: open_beside(loop.lanes.serving.engine_dir, engine_dir),
        metrics,
        wake=loop.wake,
        on_promoted=describe,
        on_memory_changed=(lambda: None) if load is None else load.rebase_memory,
    )
    server = ConnectionServer(options.socket_path, service)

    terminations = 0

    def terminate(signum: int, frame: Any) -> None:
        nonlocal terminations
        terminations += 1
        if terminations > 1:
            os._exit(0)
        loop.request_stop()

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.start()
    logger.info("serving %s on %s", info.get("name", "the engine"), options.socket_path)
    if options.candidate_engine_dir:
        loop.swap.start(options.candidate_engine_dir, options.trial)
    try:
        loop.run()
    finally:
        server.stop()
        for each in loop.lanes:
            each.session.close()
