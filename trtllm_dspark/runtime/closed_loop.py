"""Drive a session with a list of requests, so many at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trtllm_dspark.errors import DeviceError
from trtllm_dspark.runtime.outputs import RequestOutput
from trtllm_dspark.runtime.request import Request
from trtllm_dspark.runtime.session import Session


def run_closed_loop(session: Session, requests: Iterable[Request], *, batch_size: int) -> Iterator[RequestOutput]:
    """Yield every output of the requests; a new one joins as soon as one ends.

    Args:
        session: an idle session.
        requests: in the order they join.
        batch_size: requests in flight at most.

    Raises:
        RequestError: the session refuses a request.
        DeviceError: the engine failed.
    """
    queue = iter(requests)
    in_flight = 0
    while True:
        while in_flight < batch_size and (request := next(queue, None)) is not None:
            session.add(request)
            in_flight += 1
        if not session.has_unfinished():
            return
        for output in session.step():
            in_flight -= output.finished
            yield output
        if session.failure is not None:
            raise DeviceError(f"the engine failed: {session.failure}")
