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
    server = start_server("--speculation=threshold:0.5", "--max_queue_size=256", "--acceptance=coupled")
    address = ("127.0.0.1", server.http_port)
    load = asyncio.run(load_serving.run(address, server.pid, seconds=20.0, streams=64, max_tokens=150, sampled=0.2))
    tokenizer = Tokenizer(tokenizer_json())
    wrong = [
        (job, text)
        for job, text in load.texts
        if not job.temperature
        and text != tokenizer.decode(toy_pair.continuation(encode(job.prompt)[-1], job.max_tokens))
    ]
    assert wrong == []
    assert load.finished > 64
    assert load.cancelled > 0
    # /dev/shm does not grow once every stream has been there; the memory of a run this short still settles.
    assert load.shm_bytes[-1] <= load.shm_bytes[len(load.shm_bytes) // 2]
    wait_for(lambda: server.metric("dspark_requests_running") + server.metric("dspark_requests_waiting") == 0)
    assert server.metric("dspark_slots", state="free") == 4
    assert server.metric("dspark_requests_failed", reason="engine_failure") == 0
    received = server.metric("dspark_requests_received")
    ended = sum(
        server.metric(f"dspark_requests_{end}", reason=reason)
        for end, reason in (("finished", "length"), ("cancelled", "client"), ("finished", "stop"))
    )
    assert received == ended == load.finished + load.cancelled
    sampled = [(job, text) for job, text in load.texts if job.temperature]
    assert len(sampled) > 10
    assert asyncio.run(load_serving.differences(address, sampled[:80])) == []
