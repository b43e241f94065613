"""Put session, queue, socket and watchdog together and run until told to stop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_dspark.engine_process.connections import ConnectionServer
from trtllm_dspark.engine_process.loop import EngineLoop, SessionLike
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.queue import RequestQueue
from trtllm_dspark.engine_process.requests import GenerationRequest, PromptEncoder, RequestLimits
from trtllm_dspark.engine_process.service import EngineService
from trtllm_dspark.serving.watchdog import exit_with_parent

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How the process serves.

    Attributes:
        socket_path: Unix socket to listen on.
        num_slots: requests run at once.
        max_queue_size: requests that may wait.
        parent_pid: process to die with, or None to live on its own.
    """

    socket_path: str
    num_slots: int
    max_queue_size: int
    parent_pid: int | None = None


def serve_session(
    session: SessionLike,
    make_request: Callable[[str, GenerationRequest], Any],
    encoder: PromptEncoder,
    limits: RequestLimits,
    options: ProcessOptions,
    info: Mapping[str, Any],
) -> None:
    """Serve `session` on the socket until SIGTERM; running and waiting requests finish first.

    A second SIGTERM ends the process at once.
    """
    if options.parent_pid is not None:
        exit_with_parent(options.parent_pid)
    metrics = EngineMetrics()
    metrics.set("dspark_kv_tokens", options.num_slots * limits.max_seq_len, state="max")
    queue = RequestQueue(max_waiting=options.max_queue_size)
    loop = EngineLoop(
        session,
        make_request,
        num_slots=options.num_slots,
        queue=queue,
        metrics=metrics,
        token_text=encoder.token_text,
    )
    service = EngineService(loop, encoder, limits, metrics, info)
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
    try:
        loop.run()
    finally:
        server.stop()
