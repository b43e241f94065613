"""Another drafter is swapped into a running server under load: no stream notices, and the better one stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import toy_pair as toy
from helpers.toy_tokenizer import encode, tokenizer_json
from helpers.triton_server import Server, wait_for

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.runtime import Tokenizer
from trtllm_dspark.serving.children import command_line

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import load_serving

MISTAKES = {"better": None, "worse": 2}


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return engines of the toy target with other drafters: one that is never wrong and one that often is."""
    built = {}
    for name, mistake_every in MISTAKES.items():
        pair = toy.write_toy_pair(tmp_path_factory.mktemp(name), mistake_every=mistake_every)
        built[name] = tmp_path_factory.mktemp(name) / "engine"
        build_engine(
            BuildConfig(
                target_checkpoint=str(pair.target_dir), draft_checkpoint=str(pair.drafter_dir),
                output_dir=built[name], max_batch_size=4, max_seq_len=2048,
            )
        )  # fmt: skip
    return built


class Load:
    """Streams that run until told to stop; every finished one is kept."""

    def __init__(self, server: Server) -> None:
        self.load = load_serving.Load()
        self._until = [False]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(server)))
        self._thread.start()

    async def _run(self, server: Server) -> None:
        async def client(index: int) -> None:
            generator = load_serving.random.Random(index)
            while not self._until[0]:
                job = load_serving.random_job(generator, 60, 0.1, 0.0)
                text = await load_serving.stream(("127.0.0.1", server.http_port), job, self.load)
                if text is not None:
                    self.load.texts.append((job, text))

        await asyncio.gather(*(client(index) for index in range(8)))

    def stop(self) -> list[tuple[load_serving.Job, str]]:
        self._until[0] = True
        self._thread.join(60.0)
        assert not self._thread.is_alive(), "a stream never ended"
        return self.load.texts


def swap(server: Server, *flags: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "trtllm_dspark.cli.main", "swap", f"--launcher_pid={server.pid}", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return result.returncode, json.loads(result.stdout) if result.stdout else {"error": result.stderr}


def test_swap_under_load_worse_is_rolled_back_then_better_promoted_and_kept_by_a_restart(
    start_server: Callable[..., Server], candidates: dict[str, Path], toy_pair: toy.ToyPair
) -> None:
    server = start_server("--speculation=threshold:0.01")
    engine = server.children()["engine"]
    load = Load(server)
    code, status = swap(server, f"--candidate_engine_dir={candidates['worse']}", "--swap_min_requests=10")
    assert (code, status["outcome"]) == (1, "rolled_back"), status
    assert status["difference_high"] < 0
    wait_for(lambda: server.metric("dspark_swap_state", state="idle") == 1)
    code, status = swap(server, f"--candidate_engine_dir={candidates['better']}", "--swap_min_requests=10")
    assert (code, status["outcome"]) == (0, "promoted"), status
    assert status["serving_engine_dir"] == str(candidates["better"])
    wait_for(lambda: server.metric("dspark_swap_state", state="idle") == 1)
    texts = load.stop()
    tokenizer = Tokenizer(tokenizer_json())
    assert len(texts) > 40
    assert all(
        text == tokenizer.decode(toy_pair.continuation(encode(job.prompt)[-1], job.max_tokens)) for job, text in texts
    )
    assert (
        server.metric("dspark_swaps", outcome="promoted") == server.metric("dspark_swaps", outcome="rolled_back") == 1
    )
    assert server.children()["engine"] == engine
    wait_for(lambda: server.metric("dspark_slots", state="free") == 4)
    # The drafter that was promoted is the one that a new engine process starts with.
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: server.children().get("engine", engine) != engine)
    server.wait_ready()
    assert str(candidates["better"]) in command_line(server.children()["engine"])
    assert server.generate_text("a", 5) == "bcdef"


def test_candidate_from_the_start_and_one_that_fits_not(
    start_server: Callable[..., Server], candidates: dict[str, Path], tmp_path: Path
) -> None:
    server = start_server(f"--candidate_engine_dir={candidates['better']}", "--swap_min_requests=5")
    load = Load(server)
    wait_for(lambda: server.metric("dspark_swaps", outcome="promoted") == 1, timeout_s=60.0)
    load.stop()
    assert swap(server, "--status")[1]["serving_engine_dir"] == str(candidates["better"])
    code, status = swap(server, f"--candidate_engine_dir={tmp_path / 'nothing'}")
    assert (code, status["outcome"]) == (1, "failed")
    assert "does not exist" in status["reason"]
    code, answer = swap(server)
    assert code == 2
    assert "give one of --candidate_engine_dir" in answer["error"]
