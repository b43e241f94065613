"""Many streams that join, end and leave at random: every one equals itself alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from helpers import toy_pair as toy
from helpers.toy_tokenizer import encode, tokenizer_json
from helpers.triton_server import Server, wait_for

from trtllm_dspark.runtime import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import load_serving


def test_load_every_stream_equals_itself_alone_and_slots_come_back(
    start_server: Callable[..., Server], toy_pair: toy.ToyPair
) -> None:
    server = start_server("--speculation=threshold:0.5", "--max_queue_size=256")
    tokenizer = Tokenizer(tokenizer_json())

    def expected(job: load_serving.Job) -> str:
        return tokenizer.decode(toy_pair.continuation(encode(job.prompt)[-1], job.max_tokens))

    load = asyncio.run(
        load_serving.run(
            ("127.0.0.1", server.http_port), server.pid, seconds=12.0, streams=64, max_tokens=150, expected=expected
        )
    )
    assert load.wrong == []
    assert load.finished > 64
    assert load.cancelled > 0
    assert load.shm_bytes[-1] <= load.shm_bytes[len(load.shm_bytes) // 2]
    wait_for(lambda: server.metric("dspark_requests_running") + server.metric("dspark_requests_waiting") == 0)
    assert server.metric("dspark_requests_failed", reason="engine_failure") == 0
    received = server.metric("dspark_requests_received")
    ended = sum(
        server.metric(f"dspark_requests_{end}", reason=reason)
        for end, reason in (("finished", "length"), ("cancelled", "client"), ("finished", "stop"))
    )
    assert received == ended == load.finished + load.cancelled
