"""`trtllm-dspark serve`: one-sentence errors and exit codes, and a repository a person can read."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.toy_tokenizer import encode
from helpers.triton_server import Server, free_ports

from trtllm_dspark.traffic.layout import read_info
from trtllm_dspark.traffic.shards import read_shard


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtllm_dspark.cli.main", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def ports(*numbers: int) -> list[str]:
    return [f"--{name}_port={number}" for name, number in zip(("http", "grpc", "metrics"), numbers, strict=True)]


def test_serve_port_in_use_is_one_sentence_and_code_2(toy_engine_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = serve(f"--engine_dir={toy_engine_dir}", *ports(*free_ports(2), port))
    assert result.returncode == 2
    assert result.stderr == (
        f"trtllm-dspark serve: port {port} on 127.0.0.1 is in use; stop what uses it or choose another --metrics_port\n"
    )


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--http_port=0"], 2, "--http_port is 0; choose 1..65535"),
        (["--http_port=8000", "--grpc_port=8000"], 2, "are both 8000"),
        (["--drain_timeout=-1"], 2, "--drain_timeout must not be negative"),
        (["--speculation=sideways"], 2, "sideways"),
        (["--num_threads=0"], 2, "--num_threads must be at least 1"),
        (["--frobnicate"], 2, "--frobnicate"),
    ],
)
def test_serve_bad_flag_is_one_sentence(toy_engine_dir: Path, flags: list[str], code: int, words: str) -> None:
    result = serve(f"--engine_dir={toy_engine_dir}", *ports(*free_ports(3)), *flags)
    assert result.returncode == code
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_serve_missing_engine_dir_is_code_3(tmp_path: Path) -> None:
    result = serve(f"--engine_dir={tmp_path / 'nothing'}")
    assert result.returncode == 3
    assert len(result.stderr.splitlines()) == 1


def test_serve_foreign_model_repository_is_refused(toy_engine_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    result = serve(f"--engine_dir={toy_engine_dir}", f"--model_repository={tmp_path}", *ports(*free_ports(3)))
    assert result.returncode == 2
    assert "is not empty and was not written by trtllm-dspark" in result.stderr
    assert (tmp_path / "precious").read_text() == "mine"


def test_serve_model_repository_is_written_and_reused_and_traffic_is_collected(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    repository, traffic = tmp_path / "repository", tmp_path / "traffic"
    for count in (1, 2):
        server = start_server(
            f"--model_repository={repository}",
            "--exclude_input_in_output=false",
            f"--collect_dir={traffic}",
            "--collect_share=1",
        )
        assert server.generate_text("ab", 3) == "abcde"
        assert server.stop() == 0
        info = read_info(traffic)
        (record,) = read_shard(traffic, count, info)
        assert record.token_ids.tolist() == encode("cde")
        assert record.top_ids[:, 0].tolist() == encode("de")
    assert "engine.sock" in (repository / "ensemble" / "config.pbtxt").read_text()
