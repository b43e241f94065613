"""`bench --api openai` against the project's own front, over an engine process."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import uvicorn
from helpers.running_engine import running_engine

from trtllm_dspark.cli.main import main
from trtllm_dspark.serving.openai_front.app import OpenAIFront


@pytest.fixture(scope="module")
def url(toy_engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a front over an engine of the toy pair."""
    path = tmp_path_factory.mktemp("engine") / "s"
    command = [sys.executable, "-m", "trtllm_dspark.engine_process", f"--engine_dir={toy_engine_dir}"]
    flags = [f"--socket={path}", "--num_threads=1", "--speculation=fixed"]
    with running_engine([*command, *flags], path, role="front") as client, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(OpenAIFront(client).application(), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(30.0)


@pytest.mark.parametrize("flags", [(), ("--raw",)], ids=["chat", "raw"])
def test_defaults_load_the_front_and_every_token_is_counted(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    prompts = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "abc", "ignore_eos": True},
        {"prompt": "a", "max_tokens": 5, "ignore_eos": True, "top_k": 3, "top_p": 0.5, "seed": 3, "min_tokens": 2},
        {"prompt": "b", "max_tokens": 5, "ignore_eos": True, "latency_class": "batch", "stop": ["never"]},
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["bench", "--url", url, "--api", "openai", "--prompts_file", str(prompts), "--json"]
    assert main([*common, "--max_tokens", "20", "--requests", "6", "--log_level", "error", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["load"] for row in report["rows"]] == ["1 users", "2 users", "4 users", "8 users"]
    for row in report["rows"]:
        assert (row["requests"], row["failed"]) == (6, 0)
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(2 * (20 + 5 + 5), rel=1e-2)


def test_another_model_is_refused_by_the_front(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abc"}')
    common = ["bench", "--url", url, "--api", "openai", "--prompts_file", str(prompts), "--log_level", "error"]
    assert main([*common, "--model", "tensorrt_llm"]) == 2
    assert "model_not_found" in capsys.readouterr().err
