"""An engine loop over a session with an engine in NumPy, driven round by round."""

from __future__ import annotations

import time
from typing import Any

from helpers.fake_engine import FakeEngine
from trtllm_dspark.engine_process.lanes import Lane
from trtllm_dspark.engine_process.loop import EngineLoop
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.queue import RequestQueue
from trtllm_dspark.engine_process.requests import GenerationRequest
from trtllm_dspark.engine_process.session_request import make_session_request
from trtllm_dspark.engine_process.streams import Stream
from trtllm_dspark.runtime import Session
from trtllm_dspark.speculation import LoadSource


class LoopBench:
    """A loop whose rounds the test drives by hand.

    Args:
        engine: of the serving lane.
        tokenizer: of its session; without one there is no text.
        load: of its session.
        max_waiting: room of the queue.
    """

    def __init__(
        self,
        engine: FakeEngine | None = None,
        *,
        tokenizer: Any = None,
        load: LoadSource | None = None,
        max_waiting: int = 8,
    ) -> None:
        self.engine = engine or FakeEngine(max_seq_len=400)
        self.session = Session(self.engine, tokenizer, speculation="fixed", load=load)
        self.metrics = EngineMetrics()
        self.queue = RequestQueue(max_waiting=max_waiting)
        slots = self.engine.max_batch_size
        lane = Lane(self.session, make_session_request, slots)
        self.loop = EngineLoop(lane, queue=self.queue, metrics=self.metrics)
        self.frames: list[dict[str, Any]] = []
        self._count = 0

    def submit(self, prompt: list[int], **changes: Any) -> Stream:
        self._count += 1
        fields: dict[str, Any] = {
            "prompt_token_ids": tuple(prompt), "prompt_text": "", "max_tokens": 300, "min_tokens": 0,
            "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": None, "stop": (), "stop_token_ids": (),
            "ignore_eos": True, "max_draft_len": None, "priority": 5, "timeout_s": None, "stream": True, "echo": False,
            "return_tokens": True, "return_stats": False, "return_token_texts": False, "logprobs": False,
        }  # fmt: skip
        stream = Stream(
            send=self.frames.append,
            connection_id=1,
            handle=self._count,
            session_id=str(self._count),
            request_id="",
            arrival=time.monotonic(),
        )
        stream.request = GenerationRequest(**{**fields, **changes})
        if stream.request.timeout_s is not None:
            stream.deadline = stream.arrival + stream.request.timeout_s
        self.loop.submit(stream)
        return stream

    def round(self) -> list[dict[str, Any]]:
        """Run what one pass of `run` does and return the items it sent."""
        self.frames.clear()
        self.loop._take_inbox()
        self.loop._expire(time.monotonic())
        self.loop._admit()
        for lane in self.loop.lanes:
            if lane.busy:
                self.loop._round(lane)
        return self.items()

    def items(self) -> list[dict[str, Any]]:
        return [item for frame in self.frames for item in frame.get("items", [frame])]
