"""Sessions of one loop: the one that serves, and beside it a candidate on trial or one that is being emptied."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trtllm_dspark.engine_process.requests import GenerationRequest
from trtllm_dspark.engine_process.streams import Stream
from trtllm_dspark.errors import DeviceError


class SessionLike(Protocol):
    """The part of `runtime.Session` the loop uses."""

    def add(self, request: Any) -> None:
        """Admit one request."""
        ...

    def cancel(self, request_id: str) -> Any:
        """Free the request's slot."""
        ...

    def step(self) -> Sequence[Any]:
        """Run one round and return one output a request."""
        ...

    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        ...

    def close(self) -> None:
        """Release the engine."""
        ...

    @property
    def held_back(self) -> bool:
        """Whether the last step computed nothing: the load of the device lets no request start."""
        ...

    @property
    def failure(self) -> DeviceError | None:
        """Why the session takes no more requests."""
        ...


@dataclass(eq=False)
class Lane:
    """One session and what runs in it.

    Attributes:
        session: what generates; only the loop's thread touches it.
        make_request: (session id, validated request) -> the session's own request type.
        num_slots: requests the session runs at once.
        engine_dir: where its engine is; "" where nobody needs to know.
        max_draft_len: the engine's gamma.
        running: by session id.
        ending: those stopped by their id, by session id: they hold no slot in the next round and get its last text.
        draining: takes no further requests.
        request_limit: returns how many requests the load of the device allows all lanes to run now, None = as many as
            there are slots; None where nothing watches the load.
    """

    session: SessionLike
    make_request: Callable[[str, GenerationRequest], Any]
    num_slots: int
    engine_dir: str = ""
    max_draft_len: int = 0
    running: dict[str, Stream] = field(default_factory=dict)
    ending: dict[str, Stream] = field(default_factory=dict)
    draining: bool = False
    request_limit: Callable[[], int | None] | None = None

    @property
    def num_free(self) -> int:
        """Slots that take requests."""
        return 0 if self.draining else self.num_slots - len(self.running)

    @property
    def busy(self) -> bool:
        """Whether a round would do anything."""
        return bool(self.running) or self.session.has_unfinished()


class LaneSet:
    """One lane that serves and at most one beside it.

    Args:
        serving: the first lane.
        seed: of the draw that sends requests to the second one.
    """

    def __init__(self, serving: Lane, *, seed: int | None = None) -> None:
        self.serving = serving
        self.beside: Lane | None = None
        self.share = 0.0
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[Lane]:
        """Yield the lanes, the serving one first."""
        yield self.serving
        if self.beside is not None:
            yield self.beside

    @property
    def num_slots(self) -> int:
        """Slots of all lanes."""
        return sum(lane.num_slots for lane in self)

    @property
    def num_free(self) -> int:
        """Requests that would be taken now; the lanes share one device, so its load limits their sum."""
        free = sum(lane.num_free for lane in self)
        watch = self.serving.request_limit
        limit = None if watch is None else watch()
        return free if limit is None else max(0, min(free, limit - self.num_running))

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return sum(len(lane.running) for lane in self)

    def running(self) -> tuple[Stream, ...]:
        """Return every stream that holds a slot."""
        return tuple(stream for lane in self for stream in lane.running.values())

    def lane_of(self, stream: Stream) -> Lane:
        """Return the lane a running stream is in."""
        return next(lane for lane in self if stream.session_id in lane.running)

    def choose(self) -> Lane | None:
        """Return the lane of the next request, or None when all are full.

        The second lane gets `share` of them by a draw that looks at nothing of the request; where one lane is full the
        other takes over.
        """
        if self.num_free <= 0:
            return None
        beside = self.beside
        if beside is None or beside.num_free <= 0:
            return self.serving
        if self.serving.num_free <= 0 or self._random.random() < self.share:
            return beside
        return self.serving
