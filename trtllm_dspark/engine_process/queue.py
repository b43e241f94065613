"""The waiting room in front of the session: bounded, by priority with ageing, first come first served within one."""

from __future__ import annotations

import heapq
import itertools

from trtllm_dspark.engine_process.streams import Stream, StreamState
from trtllm_dspark.errors import RequestError

DEFAULT_PRIORITY = 5


class RequestQueue:
    """Order waiting requests.

    A request of priority p (1 is the most urgent, 10 the least, 5 the default) goes as if it had arrived
    `(p - 1) * ageing_s` seconds later, so urgent work overtakes and nothing starves.

    Args:
        max_waiting: requests that may wait; further ones are refused.
        ageing_s: head start of one priority level in seconds.
    """

    def __init__(self, *, max_waiting: int, ageing_s: float = 2.0) -> None:
        self._max_waiting = max_waiting
        self._ageing_s = ageing_s
        self._heap: list[tuple[float, int, Stream]] = []
        self._sequence = itertools.count()
        self._waiting = 0

    def __len__(self) -> int:
        """Return how many requests wait."""
        return self._waiting

    def push(self, stream: Stream, *, priority: int = DEFAULT_PRIORITY, num_free: int = 0) -> None:
        """Add a request.

        Args:
            stream: the request.
            priority: 1 is the most urgent.
            num_free: slots that the next waiting requests will take at once; those do not count as waiting.

        Raises:
            RequestError: `queue_full`.
        """
        if self._waiting >= self._max_waiting + num_free:
            raise RequestError(
                f"{self._waiting} requests are waiting, which is the limit; retry later or start the server with a "
                "higher --max_queue_size",
                code="queue_full",
            )
        stream.state = StreamState.WAITING
        key = stream.arrival + (priority - 1) * self._ageing_s
        heapq.heappush(self._heap, (key, next(self._sequence), stream))
        self._waiting += 1

    def pop(self) -> Stream | None:
        """Take the next request, or None when nobody waits."""
        while self._heap:
            _, _, stream = heapq.heappop(self._heap)
            if stream.state is StreamState.WAITING:
                self._waiting -= 1
                return stream
        return None

    def discard(self, stream: Stream) -> None:
        """Forget a waiting request that was cancelled or missed its deadline."""
        if stream.state is StreamState.WAITING:
            stream.state = StreamState.DONE
            self._waiting -= 1
            if len(self._heap) > 64 and self._waiting * 2 < len(self._heap):
                self._heap = [entry for entry in self._heap if entry[2].state is StreamState.WAITING]
                heapq.heapify(self._heap)
