"""Who answers prompts for training: an engine's session, or the target in PyTorch (`torch_answer`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.runtime import Request, Session, Tokenizer
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.train.features import Captured

Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered.

    Attributes:
        request: with the job's number as its name.
        token_ids: the answer, with the token that ended it.
        captured: features and targets of prompt and answer, where the answerer keeps them.
    """

    request: Request
    token_ids: list[int]
    captured: Captured | None = None

    @property
    def index(self) -> int:
        """Number of the job."""
        return int(self.request.request_id)


class Answerer(Protocol):
    """Answers requests side by side."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the target."""

    @property
    def limits(self) -> EngineLimits:
        """What a request must fit."""

    def answers(
        self, requests: Iterable[Request], batch_size: int, *, stop: Stop, keep_features: bool
    ) -> Iterator[Answer]:
        """Yield each request's answer as it ends.

        Args:
            requests: in the order they join.
            batch_size: in flight at most.
            stop: asked after every round; true drops what has not ended.
            keep_features: capture what training needs, where the answerer can.
        """

    def close(self) -> None:
        """Release memory and threads."""


class SessionAnswerer:
    """A session without speculation: exactly what serving emits, whatever shares the batch; captures nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the target."""
        return self._session.tokenizer

    @property
    def limits(self) -> EngineLimits:
        """What a request must fit."""
        return self._session.limits

    def close(self) -> None:
        """Close the session."""
        self._session.close()

    def answers(
        self, requests: Iterable[Request], batch_size: int, *, stop: Stop, keep_features: bool
    ) -> Iterator[Answer]:
        """Yield each request's answer as it ends."""
        pending: dict[str, Request] = {}
        tokens: dict[str, list[int]] = {}

        def admitted() -> Iterator[Request]:
            for request in requests:
                if stop():
                    return
                pending[request.request_id] = request
                tokens[request.request_id] = []
                yield request

        stopping = False
        for output in run_closed_loop(self._session, admitted(), batch_size=batch_size):
            tokens[output.request_id] += output.new_token_ids
            if output.finished:
                request, answer = pending.pop(output.request_id), tokens.pop(output.request_id)
                if output.finish_reason in ("stop", "length"):
                    yield Answer(request, answer)
            if not stopping and stop():
                stopping = True
                for name in pending:
                    self._session.cancel(name)
