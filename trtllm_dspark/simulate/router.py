"""Who gets the next request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.simulate.node import Node

RouterName = Literal["round_robin", "least_loaded", "load_aware"]
ROUTERS: tuple[RouterName, ...] = get_args(RouterName)


class Router(Protocol):
    """Chooses among replicas by what their health checks and metrics say."""

    def choose(self, nodes: Sequence[Node]) -> Node | None:
        """Return the replica of the next request, or None when none is ready."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, nodes: Sequence[Node]) -> Node | None:
        """See `Router`."""
        ready = _ready(nodes)
        if not ready:
            return None
        self._next += 1
        return ready[(self._next - 1) % len(ready)]


class LeastLoaded:
    """The one with the fewest requests (`dspark_requests_running` + `dspark_requests_waiting`)."""

    def choose(self, nodes: Sequence[Node]) -> Node | None:
        """See `Router`."""
        return min(_ready(nodes), key=_requests, default=None)


class LoadAware:
    """The one whose requests, stretched by `dspark_load_compute_scale`, are the fewest; none that closed admission."""

    def choose(self, nodes: Sequence[Node]) -> Node | None:
        """See `Router`."""
        ready = [node for node in _ready(nodes) if not node.state.admission_closed]
        return min(ready, key=lambda node: (_requests(node) + 1) * node.state.compute_scale, default=None)


def make_router(name: str) -> Router:
    """Return a router by its name in `ROUTERS`.

    Raises:
        ConfigError: there is none of that name.
    """
    makers: dict[str, type[RoundRobin] | type[LeastLoaded] | type[LoadAware]] = {
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "load_aware": LoadAware,
    }
    if name not in makers:
        raise ConfigError(f"router '{name}' is not known; use {', '.join(ROUTERS)}")
    return makers[name]()


def _ready(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.serving and node.ready]


def _requests(node: Node) -> int:
    return node.replica.num_running + node.replica.num_waiting
