"""One toy engine and one server for the whole folder; every test here carries the marker `triton`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.toy_pair import ToyPair, write_toy_pair
from helpers.triton_server import Server, wait_for

from trtllm_dspark.build import BuildConfig, build_engine

SLOTS = 4
MAX_SEQ_LEN = 2048


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.triton)


@pytest.fixture(scope="session")
def toy_pair(tmp_path_factory: pytest.TempPathFactory) -> ToyPair:
    """Return the closed-form pair: the drafter is wrong after every fifth token of the loop."""
    return write_toy_pair(tmp_path_factory.mktemp("toy_pair"))


@pytest.fixture(scope="session")
def toy_engine_dir(toy_pair: ToyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an engine of the toy pair: 4 requests of 2048 tokens."""
    path = tmp_path_factory.mktemp("toy_engine") / "engine"
    build_engine(
        BuildConfig(
            target_checkpoint=str(toy_pair.target_dir),
            draft_checkpoint=str(toy_pair.drafter_dir),
            output_dir=path,
            max_batch_size=SLOTS,
            max_seq_len=MAX_SEQ_LEN,
        )
    )
    return path


@pytest.fixture(scope="session")
def shared_server(toy_engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run one server for all tests that leave it as they found it."""
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(toy_engine_dir, log, ["--speculation=fixed", "--max_queue_size=64"]).start()
    yield server
    assert server.stop() == 0


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """Return the shared server and check that the test left no request and no changed process behind."""
    before = {**shared_server.children(), **shared_server.stubs()}
    yield shared_server
    _wait_idle(shared_server)
    assert {**shared_server.children(), **shared_server.stubs()} == before


@pytest.fixture
def start_server(toy_engine_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Return a function that starts a server of the test's own; it is stopped and checked for leftovers."""
    servers: list[Server] = []

    def start(*flags: str) -> Server:
        servers.append(Server(toy_engine_dir, tmp_path / f"log{len(servers)}", ["--speculation=fixed", *flags]))
        return servers[-1].start()

    yield start
    for server in servers:
        server.stop()


def _wait_idle(server: Server) -> None:
    wait_for(lambda: server.metric("dspark_requests_running") + server.metric("dspark_requests_waiting") == 0)
