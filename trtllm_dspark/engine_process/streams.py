"""One request on its way through the engine process, and where its answers go."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from trtllm_dspark.engine_process.requests import GenerationRequest
from trtllm_dspark.serving.framing import Message

Send = Callable[[Message], None]


class StreamState(enum.Enum):
    """Where a request is; it only moves forward. One that is ENDING has left its lane and waits for its last text."""

    INTAKE = "intake"
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Stream:
    """One row of one client request.

    Attributes:
        send: puts a message on the client's connection; never blocks, never raises.
        connection_id: the client's connection.
        handle: the client's own number of this request; echoed in every answer.
        session_id: the id under which the session knows it.
        request_id: the id a user gave, or "".
        arrival: monotonic seconds when the request was read.
        deadline: monotonic seconds after which it is ended, or None.
        cancel_reason: set by any thread; the loop acts on it before the next round.
        request: the validated request, set by the intake; None again once the last answer has left.
    """

    send: Send
    connection_id: int
    handle: int
    session_id: str
    request_id: str
    arrival: float
    group: int = 0
    deadline: float | None = None
    state: StreamState = StreamState.INTAKE
    cancel_reason: str | None = None
    request: GenerationRequest | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_output_tokens: int = 0
    held_text: list[str] = field(default_factory=list)
    held_tokens: list[int] = field(default_factory=list)
    held_logprobs: list[float] = field(default_factory=list)

    def fail(self, code: str, message: str) -> None:
        """End the stream with an error the client can read by code."""
        self.state = StreamState.DONE
        self.send({"type": "error", "id": self.handle, "code": code, "message": message})
        self.release()

    def release(self) -> None:
        """Drop the prompt and what was held for the answer, once that has left: tables keep streams for a while."""
        self.request = None
        self.held_text, self.held_tokens, self.held_logprobs = [], [], []
